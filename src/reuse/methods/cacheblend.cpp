// CacheBlend as its authors' code defines it (arXiv 2405.16444; one selection at layer 1, no
// gradual filtering): the floor(r N) tokens with the largest squared value deviation over all
// chunks together, and fresh keys and values for every token at the check layer. The code's mask
// for scattered rows is not causal; ours is exact (as in EPIC's fork of it). Tokens outside chunks
// play the part of its always recomputed suffix.
#include "reuse/selection.h"

namespace phasekv::reuse {
namespace {

class CacheBlend final : public Method {
 public:
  std::string_view name() const override { return "cacheblend"; }
  int64_t check_layer() const override { return 1; }

  Selection select(const SelectionInput& input) const override {
    check_input(input, /*needs_divergence=*/true);
    return recompute_only(top_overall(input.segments, input.value_divergence, input.ratio));
  }
};

}  // namespace

std::unique_ptr<Method> make_cacheblend(const MethodOptions& options) {
  refuse_options("cacheblend", options, /*has_shift_options=*/false, /*has_boundary_tokens=*/false);
  return std::make_unique<CacheBlend>();
}

}  // namespace phasekv::reuse
