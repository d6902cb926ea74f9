// CacheBlend as LMCache implements it: the floor(r N) tokens with the largest key deviation (after
// RoPE) over all chunks together; the check layer already attends over the merged cache. Tokens
// outside chunks are always fresh here, and are not candidates.
#include "reuse/selection.h"

namespace phasekv::reuse {
namespace {

class CacheBlendLMCache final : public Method {
 public:
  std::string_view name() const override { return "cacheblend_lmcache"; }
  int64_t check_layer() const override { return 1; }
  bool keeps_fresh_at_check_layer() const override { return false; }

  Selection select(const SelectionInput& input) const override {
    check_input(input, /*needs_divergence=*/true);
    return recompute_only(top_overall(input.segments, input.key_divergence, input.ratio));
  }
};

}  // namespace

std::unique_ptr<Method> make_cacheblend_lmcache(const MethodOptions& options) {
  refuse_options("cacheblend_lmcache", options, /*has_shift_options=*/false,
                 /*has_boundary_tokens=*/false);
  return std::make_unique<CacheBlendLMCache>();
}

}  // namespace phasekv::reuse
