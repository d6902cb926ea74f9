// EPIC's LegoLink (arXiv 2410.15332): the first k tokens of every chunk, which act as a false
// attention sink when a chunk is encoded alone, are computed again from the first layer on; nothing
// is measured. k is `boundary_tokens`, or ceil(r n) of each chunk so that ratios compare across
// methods.
#include <string>
#include <utility>

#include "phasekv/error.h"
#include "reuse/selection.h"

namespace phasekv::reuse {
namespace {

class Epic final : public Method {
 public:
  explicit Epic(std::optional<int64_t> boundary_tokens) : boundary_tokens_(boundary_tokens) {}

  std::string_view name() const override { return "epic"; }
  int64_t check_layer() const override { return 0; }

  Selection select(const SelectionInput& input) const override {
    check_input(input, /*needs_divergence=*/false);
    std::vector<uint8_t> probes;
    for (const Segment& segment : input.segments) {
      const int64_t boundary =
          boundary_tokens_ ? *boundary_tokens_ : ceil_share(input.ratio, segment.chunk_tokens);
      for (int64_t i = 0; i < segment.tokens; ++i) {
        probes.push_back(segment.chunk_offset + i < boundary ? 1 : 0);
      }
    }
    return recompute_only(std::move(probes));
  }

 private:
  std::optional<int64_t> boundary_tokens_;
};

}  // namespace

std::unique_ptr<Method> make_epic(const MethodOptions& options) {
  refuse_options("epic", options, /*has_shift_options=*/false, /*has_boundary_tokens=*/true);
  if (options.boundary_tokens && *options.boundary_tokens < 0) {
    throw Error(ErrorCode::invalid_argument, "boundary_tokens",
                std::to_string(*options.boundary_tokens), "zero or more tokens");
  }
  return std::make_unique<Epic>(options.boundary_tokens);
}

}  // namespace phasekv::reuse
