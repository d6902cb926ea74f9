// ProphetKV (arXiv 2602.02579) as we read its published formulas. Stage I runs the question over
// the moved chunks and scores each cached token by the attention that it receives, a mean over
// layers, query heads and the question's tokens of the softmax over the keys before the question.
// Stage II computes the floor(r N) tokens with the highest score over all chunks again, from the
// first layer on. Tokens outside chunks are always fresh here, take part in the softmax and are no
// candidates.
#include "reuse/selection.h"

namespace phasekv::reuse {
namespace {

class ProphetKV final : public Method {
 public:
  std::string_view name() const override { return "prophetkv"; }
  int64_t check_layer() const override { return 0; }
  bool needs_attention() const override { return true; }

  Selection select(const SelectionInput& input) const override {
    check_input(input, /*needs_divergence=*/false);
    check_attention(input);
    return recompute_only(top_overall(input.segments, input.attention, input.ratio));
  }
};

}  // namespace

std::unique_ptr<Method> make_prophetkv(const MethodOptions& options) {
  refuse_options("prophetkv", options, /*has_shift_options=*/false, /*has_boundary_tokens=*/false);
  return std::make_unique<ProphetKV>();
}

}  // namespace phasekv::reuse
