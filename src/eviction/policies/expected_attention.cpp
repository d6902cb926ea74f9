// ExpectedAttention (kvpress; arXiv 2510.00636): keys are scored by the attention that queries to
// come will pay to them, taken for normally distributed. Of the buffered queries of a head, turned
// back to before RoPE, mean m and covariance S are taken, then turned by R, the mean rotation of
// the next 512 positions: m' = R m, S' = R S R^T. With s the scale of the logits (1 / sqrt(d)),
//   z_j = s m'.k_j + s^2 / 2 k_j^T S' k_j
// is the logarithm of the expected exp(s q.k_j); the score is the mean over the group of softmax(z)
// times the norm of the value. The first 4 tokens are always kept; neither their queries
// nor their keys count.
//
// Ours differs in one thing: mean and covariance are those of the last 128 queries that the policy
// buffers (`queries`), not of the whole prompt's, so that they follow an agent as it goes on.
// Without any query the norm of the value alone decides.
#include <algorithm>
#include <cmath>
#include <complex>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "eviction/held_rows.h"
#include "eviction/options.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/ops/rotate_keys.h"

namespace phasekv::eviction {
namespace {

constexpr int64_t kHorizon = 512;  // positions to come

// The mean of exp(i frequency t) over the next positions t, a geometric sum, for each RoPE pair.
std::vector<std::complex<double>> mean_rotation(const RopeView& rope, int64_t next) {
  constexpr auto kCount = static_cast<double>(kHorizon);
  std::vector<std::complex<double>> rotation;
  for (int64_t f = 0; f < rope.rotary_dim / 2; ++f) {
    const double half = rope.frequencies[f] / 2.0;
    const double sine = std::sin(half);
    const double length = sine == 0.0 ? 1.0 : std::sin(kCount * half) / (kCount * sine);
    rotation.push_back(length *
                       std::polar(1.0, half * (2.0 * static_cast<double>(next) + kCount - 1.0)));
  }
  return rotation;
}

// Keys side by side, so that one instruction works on several of them: tiles of
// [head_size][kLanes], the last one filled up with zeros.
constexpr int64_t kLanes = 32;

// Keys that are worth a second thread.
constexpr int64_t kLeastShared = 16 * kLanes;

int64_t whole_tiles(int64_t tokens) { return (tokens + kLanes - 1) / kLanes * kLanes; }

std::vector<float> tiles_of(const std::vector<float>& keys, int64_t tokens, int64_t head_size) {
  std::vector<float> tiles(static_cast<size_t>(whole_tiles(tokens) * head_size), 0.0F);
  for (int64_t i = 0; i < tokens; ++i) {
    const float* key = keys.data() + i * head_size;
    float* tile = tiles.data() + i / kLanes * kLanes * head_size + i % kLanes;
    for (int64_t d = 0; d < head_size; ++d) tile[d * kLanes] = key[d];
  }
  return tiles;
}

// What is expected of one query head: z = linear.k + k^T quadratic k. Of the symmetric matrix only
// the upper half is there, with every element off the diagonal twice.
struct Expectation {
  std::vector<float> linear;     // [head_size]
  std::vector<float> quadratic;  // [head_size, head_size]
};

// `queries` [queries, head_size] before RoPE.
Expectation expectation_of(std::vector<double> queries, int64_t head_size, const RopeView& rope,
                           std::span<const std::complex<double>> rotation, double scale) {
  const auto count = static_cast<int64_t>(queries.size()) / head_size;
  const int64_t pairs = rope.rotary_dim / 2;
  const bool is_neox = rope.pairing == RopePairing::neox;
  std::vector<double> mean(static_cast<size_t>(head_size), 0.0);
  for (int64_t i = 0; i < count; ++i) {
    double* query = queries.data() + i * head_size;
    for (int64_t f = 0; f < pairs; ++f) {
      double& real = query[is_neox ? f : 2 * f];
      double& imaginary = query[is_neox ? f + pairs : 2 * f + 1];
      const std::complex<double> turned =
          std::complex<double>(real, imaginary) * rotation[static_cast<size_t>(f)];
      real = turned.real();
      imaginary = turned.imag();
    }
    for (int64_t d = 0; d < head_size; ++d) {
      mean[static_cast<size_t>(d)] += query[d] / static_cast<double>(count);
    }
  }
  std::vector<double> products(static_cast<size_t>(head_size * head_size), 0.0);
  for (int64_t i = 0; i < count; ++i) {
    double* query = queries.data() + i * head_size;
    for (int64_t d = 0; d < head_size; ++d) query[d] -= mean[static_cast<size_t>(d)];
    for (int64_t a = 0; a < head_size; ++a) {
      double* row = products.data() + a * head_size;
      for (int64_t b = a; b < head_size; ++b) row[b] += query[a] * query[b];
    }
  }
  Expectation expectation;
  expectation.linear.resize(static_cast<size_t>(head_size));
  expectation.quadratic.resize(static_cast<size_t>(head_size * head_size), 0.0F);
  const double weight = scale * scale / (2.0 * static_cast<double>(std::max<int64_t>(count, 1)));
  for (int64_t a = 0; a < head_size; ++a) {
    expectation.linear[static_cast<size_t>(a)] =
        static_cast<float>(scale * mean[static_cast<size_t>(a)]);
    for (int64_t b = a; b < head_size; ++b) {
      const double twice = a == b ? 1.0 : 2.0;
      expectation.quadratic[static_cast<size_t>(a * head_size + b)] =
          static_cast<float>(twice * weight * products[static_cast<size_t>(a * head_size + b)]);
    }
  }
  return expectation;
}

// z of the keys of one tile.
void evaluate(const Expectation& expectation, const float* tile, float* z) {
  const auto size = static_cast<int64_t>(expectation.linear.size());
  std::fill_n(z, kLanes, 0.0F);
  for (int64_t a = 0; a < size; ++a) {
    float sums[kLanes];
    std::fill_n(sums, kLanes, expectation.linear[static_cast<size_t>(a)]);
    const float* row = expectation.quadratic.data() + a * size;
    for (int64_t b = a; b < size; ++b) {
#pragma omp simd
      for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += row[b] * tile[b * kLanes + lane];
    }
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) z[lane] += tile[a * kLanes + lane] * sums[lane];
  }
}

class ExpectedAttention final : public Policy {
 public:
  ExpectedAttention(int64_t queries, ProtectedTokens kept) : queries_(queries), kept_(kept) {}

  std::string_view name() const override { return "expected_attention"; }
  PolicyNeeds needs() const override { return {.buffers = 1, .capacity = queries_, .rope = true}; }
  ProtectedTokens protected_tokens(int64_t /*budget*/) const override { return kept_; }

  void score(const PolicyInput& input, std::span<float> scores) const override {
    const int64_t size = input.key.head_size;
    const int64_t group = input.queries.heads / input.kv_heads();
    const std::vector<float> queries = before_rope(input);
    const auto rotation = mean_rotation(input.rope, input.seen);
    for (int64_t head = 0; head < input.kv_heads(); ++head) {
      const auto tokens = static_cast<size_t>(input.tokens);
      const std::span<float> row = scores.subspan(static_cast<size_t>(head) * tokens, tokens);
      const std::span<const int32_t> positions =
          input.positions.subspan(static_cast<size_t>(head) * tokens, tokens);
      const std::vector<float> tiles =
          tiles_of(held_rows(input, input.key, head), input.tokens, size);
      std::fill(row.begin(), row.end(), 0.0F);
      for (int64_t member = head * group; member < (head + 1) * group; ++member) {
        const Expectation expectation = expectation_of(rows_of_head(input, queries, member), size,
                                                       input.rope, rotation, input.scale);
        add_softmax(expectation, tiles, positions, 1.0 / static_cast<double>(group), row);
      }
      const std::vector<float> values = held_rows(input, input.value, head);
      for (size_t i = 0; i < tokens; ++i) {
        const float* value = values.data() + static_cast<int64_t>(i) * size;
        row[i] *= std::sqrt(product(value, value, size));
      }
    }
  }

 private:
  // [queries, query heads, head_size]
  static std::vector<float> before_rope(const PolicyInput& input) {
    std::vector<float> queries = query_rows(input);
    std::vector<int64_t> back(input.query_positions.size());
    std::transform(input.query_positions.begin(), input.query_positions.end(), back.begin(),
                   std::negate<>());
    const RowsView rows = view_of(&queries, input.queries.heads, input.queries.head_size);
    rotate_keys({.keys = rows, .deltas = back.data(), .rope = input.rope, .out = rows});
    return queries;
  }

  // [queries, head_size], without those of sinks
  std::vector<double> rows_of_head(const PolicyInput& input, const std::vector<float>& queries,
                                   int64_t head) const {
    const RowsView& view = input.queries;
    std::vector<double> rows;
    for (int64_t i = 0; i < view.tokens; ++i) {
      if (input.query_positions[static_cast<size_t>(i)] < kept_.sinks) continue;
      const auto begin = queries.begin() + (i * view.heads + head) * view.head_size;
      rows.insert(rows.end(), begin, begin + view.head_size);
    }
    return rows;
  }

  // scores += weight * softmax(z) over the tokens that are no sinks.
  void add_softmax(const Expectation& expectation, const std::vector<float>& tiles,
                   std::span<const int32_t> positions, double weight,
                   std::span<float> scores) const {
    std::vector<float> z(static_cast<size_t>(whole_tiles(static_cast<int64_t>(scores.size()))));
    const auto size = static_cast<int64_t>(expectation.linear.size());
    const auto count = static_cast<int64_t>(z.size());
#pragma omp parallel for schedule(static) if (count >= kLeastShared)
    for (int64_t i = 0; i < count; i += kLanes) {
      evaluate(expectation, tiles.data() + i * size, z.data() + i);
    }
    float largest = -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < scores.size(); ++i) {
      if (positions[i] >= kept_.sinks) largest = std::max(largest, z[i]);
    }
    double sum = 0.0;
    for (size_t i = 0; i < scores.size(); ++i) {
      z[i] = positions[i] < kept_.sinks ? 0.0F : std::exp(z[i] - largest);
      sum += z[i];
    }
    for (size_t i = 0; i < scores.size(); ++i) {
      scores[i] += static_cast<float>(weight * z[i] / std::max(sum, 1.0));
    }
  }

  int64_t queries_;
  ProtectedTokens kept_;
};

}  // namespace

std::unique_ptr<Policy> make_expected_attention(const PolicyOptions& options) {
  check_options("expected_attention", options, {.queries = true, .sinks = true, .recent = true});
  return std::make_unique<ExpectedAttention>(
      options.queries.value_or(128),
      ProtectedTokens{options.sinks.value_or(4), options.recent.value_or(0)});
}

}  // namespace phasekv::eviction
