// TriAttention (arXiv 2604.04921): keys are scored by the model's mean query, calibrated
// beforehand, as it would stand at the next positions; no query of the request is looked at. Each
// query head's scores are normalised, the group's largest counts, and the newest 128 tokens are
// kept, as in the authors' serving runtime.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "eviction/options.h"
#include "phasekv/error.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/ops/triattention_score.h"
#include "validate.h"

namespace phasekv::eviction {
namespace {

class Triattention final : public Policy {
 public:
  Triattention(std::shared_ptr<const TriattentionStatistics> statistics, ProtectedTokens kept)
      : statistics_(std::move(statistics)), kept_(kept) {}

  std::string_view name() const override { return "triattention"; }
  PolicyNeeds needs() const override { return {}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return kept_; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    const TriattentionStatistics& statistics = *statistics_;
    check_indices("layer", &input.layer, 1, statistics.layers);
    const int64_t heads = statistics.query_heads;
    const int64_t pairs = statistics.rotary_dim / 2;
    std::vector<float> synthetic_query(static_cast<size_t>(heads * input.key.head_size));
    std::vector<float> norm_weights(static_cast<size_t>(heads * pairs));
    triattention_query(
        {.query_heads = heads,
         .head_size = input.key.head_size,
         .rope = {.frequencies = statistics.frequencies.data(),
                  .rotary_dim = statistics.rotary_dim,
                  .pairing = statistics.pairing},
         .mean_query = statistics.mean_query.data() + input.layer * heads * pairs * 2,
         .mean_norm = statistics.mean_norm.data() + input.layer * heads * pairs,
         .magnitude = statistics.magnitude,
         .time = input.seen,
         .synthetic_query = synthetic_query.data(),
         .norm_weights = norm_weights.data()});
    TriattentionScoreParams params;
    params.key = input.key;
    params.block_table = input.block_table;
    params.first_token = input.first_token;
    params.tokens = input.tokens;
    params.synthetic_query = synthetic_query.data();
    params.norm_weights = norm_weights.data();
    params.query_heads = heads;
    params.rotary_dim = statistics.rotary_dim;
    params.pairing = statistics.pairing;
    params.normalize = true;
    params.scores = scores.data();
    input.backend->triattention_score(params);
  }

 private:
  std::shared_ptr<const TriattentionStatistics> statistics_;
  ProtectedTokens kept_;
};

}  // namespace

std::unique_ptr<Policy> make_triattention(const PolicyOptions& options) {
  check_options("triattention", options, {.sinks = true, .recent = true, .statistics = true});
  if (options.statistics == nullptr) {
    throw Error(ErrorCode::missing_capability, "statistics", "none",
                "triattention needs the model's calibration; `phasekv calibrate` makes it");
  }
  return std::make_unique<Triattention>(
      options.statistics, ProtectedTokens{options.sinks.value_or(0), options.recent.value_or(128)});
}

}  // namespace phasekv::eviction
