// No cached token is computed again, whatever the ratio: keys are moved to their new position,
// values are taken as they are.
#include "reuse/selection.h"

namespace phasekv::reuse {
namespace {

class FullReuse final : public Method {
 public:
  std::string_view name() const override { return "full_reuse"; }
  int64_t check_layer() const override { return 0; }

  Selection select(const SelectionInput& input) const override {
    check_input(input, /*needs_divergence=*/false);
    return recompute_only(
        std::vector<uint8_t>(static_cast<size_t>(total_tokens(input.segments)), 0));
  }
};

}  // namespace

std::unique_ptr<Method> make_full_reuse(const MethodOptions& options) {
  refuse_options("full_reuse", options, /*has_shift_options=*/false, /*has_boundary_tokens=*/false);
  return std::make_unique<FullReuse>();
}

}  // namespace phasekv::reuse
