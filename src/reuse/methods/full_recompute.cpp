// Every token is computed again: exact, whatever the ratio. The reference for all other methods.
#include "reuse/selection.h"

namespace phasekv::reuse {
namespace {

class FullRecompute final : public Method {
 public:
  std::string_view name() const override { return "full_recompute"; }
  int64_t check_layer() const override { return 0; }

  Selection select(const SelectionInput& input) const override {
    check_input(input, /*needs_divergence=*/false);
    return recompute_only(
        std::vector<uint8_t>(static_cast<size_t>(total_tokens(input.segments)), 1));
  }
};

}  // namespace

std::unique_ptr<Method> make_full_recompute(const MethodOptions& options) {
  refuse_options("full_recompute", options, /*has_shift_options=*/false,
                 /*has_boundary_tokens=*/false);
  return std::make_unique<FullRecompute>();
}

}  // namespace phasekv::reuse
