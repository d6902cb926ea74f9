#include "phasekv/ops/triattention_score.h"

#include <cmath>
#include <complex>
#include <string>

#include "dispatch.h"
#include "ops/key_range.h"
#include "validate.h"

namespace phasekv {
namespace {

constexpr int64_t kLargestOffset = 65536;

// The mean of exp(i frequency (time + offset)) over the offsets 1, 2, 4, ..., 65536.
std::complex<double> mean_rotation(double frequency, int64_t time) {
  std::complex<double> sum = 0.0;
  int64_t offsets = 0;
  for (int64_t offset = 1; offset <= kLargestOffset; offset *= 2, ++offsets) {
    sum += std::polar(1.0, frequency * static_cast<double>(time + offset));
  }
  return sum / static_cast<double>(offsets);
}

void check_query_heads(int64_t query_heads) {
  if (query_heads < 1) refuse("query_heads", query_heads, "at least 1");
}

}  // namespace

void triattention_query(const TriattentionQueryParams& params) {
  check_query_heads(params.query_heads);
  if (params.head_size < 1) refuse("head_size", params.head_size, "at least 1");
  check_rope(params.rope, params.head_size);
  check_not_null("mean_query", params.mean_query, params.query_heads);
  check_not_null("mean_norm", params.mean_norm, params.query_heads);
  if (!std::isfinite(params.magnitude)) {
    refuse("magnitude", std::to_string(params.magnitude), "finite");
  }
  if (params.time < 0 || params.time > kMaxDelta) {
    refuse("time", params.time, "in [0, " + std::to_string(kMaxDelta) + "]");
  }
  check_not_null("synthetic_query", params.synthetic_query, params.query_heads);
  check_not_null("norm_weights", params.norm_weights, params.query_heads);

  const int64_t pairs = params.rope.rotary_dim / 2;
  const bool is_neox = params.rope.pairing == RopePairing::neox;
  for (int64_t i = 0; i < params.query_heads * params.head_size; ++i) {
    params.synthetic_query[i] = 0.0F;
  }
  for (int64_t f = 0; f < pairs; ++f) {
    const std::complex<double> rotation =
        params.magnitude * mean_rotation(params.rope.frequencies[f], params.time);
    for (int64_t head = 0; head < params.query_heads; ++head) {
      const float* mean = params.mean_query + 2 * (head * pairs + f);
      const std::complex<double> query(mean[0], mean[1]);
      const std::complex<double> rotated = query * rotation;
      float* to = params.synthetic_query + head * params.head_size + (is_neox ? f : 2 * f);
      to[0] = static_cast<float>(rotated.real());
      to[is_neox ? pairs : 1] = static_cast<float>(rotated.imag());
      const double norm = params.mean_norm[head * pairs + f];
      params.norm_weights[head * pairs + f] =
          static_cast<float>(params.magnitude * (norm - std::abs(query)));
    }
  }
}

void triattention_score(const TriattentionScoreParams& params) {
  check_key_range(params.key, params.block_table, params.first_token, params.tokens);
  check_query_heads(params.query_heads);
  check_whole_groups("query_heads", params.query_heads, params.key);
  check_rotary_dim("rotary_dim", params.rotary_dim, params.key.head_size);
  check_not_null("synthetic_query", params.synthetic_query, params.query_heads);
  check_not_null("norm_weights", params.norm_weights, params.query_heads);
  check_not_null("scores", params.scores, params.tokens);
  if (params.tokens > 0) active_kernels().triattention_score(params);
}

}  // namespace phasekv
