#include "eviction_workload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <unordered_set>

#include "bytes.h"
#include "measuring.h"
#include "phasekv/layout.h"
#include "phasekv/ops.h"

namespace phasekv::benchmarks {
namespace {

// Far more than caches hold.
constexpr int64_t kWorkingSet = int64_t{256} << 20;
constexpr int64_t kFirstToken = 5;
constexpr int32_t kPhases = 4;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

uint32_t stored_bits(float x, DataType dtype) {
  if (dtype == DataType::float32) return bits_of(x);
  if (dtype == DataType::bfloat16) return bits_of(x) >> 16;
  const auto half = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

// Normally distributed numbers.
Bytes random_elements(int64_t count, DataType dtype, uint32_t seed) {
  constexpr size_t kDifferent = 4093;  // drawing each would take longer than the measurement
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<uint32_t> some;
  for (size_t i = 0; i < kDifferent; ++i) some.push_back(stored_bits(normal(generator), dtype));
  const auto bytes = static_cast<size_t>(size_of(dtype));
  Bytes elements(static_cast<size_t>(count) * bytes);
  for (size_t at = 0; at < elements.size(); at += bytes) {
    std::memcpy(elements.data() + at, &some[generator() % kDifferent], bytes);
  }
  return elements;
}

struct Layer {
  Bytes pool;
  Bytes query;
  Bytes query_buffer;
  Bytes copy_from;
  Bytes copy_to;
  PagedKV kv;
};

// A request in every layer, on every other block from the fifth token of its first one.
class EvictionWorkload final : public Workload {
 public:
  explicit EvictionWorkload(const Shape& shape) : shape_(shape) {
    for (int64_t at = 0; at < kFirstToken + shape.tokens; at += shape.block_size) {
      block_table_.push_back(static_cast<int32_t>(2 * block_table_.size() + 1));
    }
    choose_survivors();
    for (int64_t i = 0; i < shape.queries; ++i) {
      limits_.push_back(shape.tokens - shape.queries + i + 1);
      phases_.push_back(static_cast<int32_t>(i * kPhases / shape.queries));
      query_rows_.push_back(i);
    }
    const int64_t layers = std::max<int64_t>(3, kWorkingSet / pool_bytes());
    for (int64_t i = 0; i < layers; ++i) layers_.push_back(make_layer(static_cast<uint32_t>(i)));
    scores_.resize(static_cast<size_t>(kPhases * shape.kv_heads * shape.tokens));
    frequencies_.assign(static_cast<size_t>(shape.head_size / 2), 0.01);
    weights_.assign(static_cast<size_t>(query_heads() * shape.head_size), 0.1F);
  }

  const Shape& shape() const override { return shape_; }
  void next_layer() override { current_ = (current_ + 1) % layers_.size(); }
  void copy(int64_t bytes) override {
    parallel_memcpy(layer().copy_to.data(), layer().copy_from.data(), bytes);
  }

  std::vector<Op> ops() override {
    std::vector<Op> ops;
    const auto multiply = [&](const char* name, const char* adjacent, double flop,
                              std::function<void()> run) {
      ops.push_back({.name = name,
                     .adjacent = adjacent,
                     .bound = Bound::dot_products,
                     .work = flop,
                     .run = std::move(run)});
    };
    const auto move = [&](const char* name, const char* adjacent, int64_t bytes, int64_t line_bytes,
                          std::function<void()> run) {
      ops.push_back({.name = name,
                     .adjacent = adjacent,
                     .work = static_cast<double>(bytes),
                     .line_bytes = static_cast<double>(line_bytes),
                     .run = std::move(run)});
    };
    multiply("score_keys max_logit", "tokens", score_flop(),
             [this] { score(key(), GroupReduction::max_logit); });
    multiply("score_keys max", "tokens", score_flop(),
             [this] { score(key(), GroupReduction::max); });
    multiply("score_keys mean", "tokens", score_flop(),
             [this] { score(key(), GroupReduction::mean); });
    multiply("score_keys max_logit", "dimensions", score_flop(),
             [this] { score(key_as_value(), GroupReduction::max_logit); });
    multiply("accumulate_attention", "tokens", causal_flop(), [this] { accumulate(key()); });
    multiply("accumulate_attention", "dimensions", causal_flop(),
             [this] { accumulate(key_as_value()); });
    multiply("key_redundancy distinct", "tokens", pair_flop(),
             [this] { measure_redundancy(kAboveEverySimilarity); });
    multiply("key_redundancy similar", "tokens", pair_flop(), [this] { measure_redundancy(0.1F); });
    multiply("expected_attention_score", "keys tokens", quadratic_flop(),
             [this] { score_expectation(); });
    move("keydiff_score", "tokens", key_bytes(), 0, [this] { compare_directions(); });
    move("triattention_score", "tokens", key_bytes(), 0, [this] { score_triattention(); });
    move("push_queries", "", 2 * query_elements() * size_of(shape_.dtype), 0, [this] { push(); });
    move("compact", "keys tokens", moved_bytes(), line_bytes(key(), value()),
         [this] { move_survivors(key(), value()); });
    move("compact", "tokens", moved_bytes(), line_bytes(key(), value_as_key()),
         [this] { move_survivors(key(), value_as_key()); });
    move("compact", "dimensions", moved_bytes(), 0,
         [this] { move_survivors(key_as_value(), value()); });
    return ops;
  }

 private:
  static constexpr float kAboveEverySimilarity = 2.0F;

  Layer& layer() { return layers_[current_]; }
  const PagedView& key() { return layer().kv.key; }
  const PagedView& value() { return layer().kv.value; }
  // The values' memory in the arrangement of the keys, and the other way round.
  PagedView value_as_key() {
    PagedView view = key();
    view.data = value().data;
    return view;
  }
  PagedView key_as_value() {
    PagedView view = value();
    view.data = key().data;
    return view;
  }

  int64_t query_heads() const { return shape_.kv_heads * shape_.group; }
  int64_t query_elements() const { return shape_.queries * query_heads() * shape_.head_size; }
  int64_t per_head() const { return 2 * shape_.block_size * shape_.head_size; }
  int64_t num_blocks() const { return 2 * static_cast<int64_t>(block_table_.size()); }
  int64_t pool_bytes() const {
    return num_blocks() * shape_.kv_heads * per_head() * size_of(shape_.dtype);
  }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(shape_.head_size)); }

  // Any keys, other ones in each KV head.
  void choose_survivors() {
    std::mt19937 generator(1);
    std::vector<int64_t> kept;
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      std::vector<int64_t> all(static_cast<size_t>(shape_.tokens));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), generator);
      std::sort(all.begin(), all.begin() + shape_.kept);
      kept.insert(kept.end(), all.begin(), all.begin() + shape_.kept);
    }
    moves_ = plan_compaction(kept, shape_.kv_heads, shape_.tokens);
  }

  Layer make_layer(uint32_t seed) const {
    Layer layer;
    layer.pool = random_elements(pool_bytes() / size_of(shape_.dtype), shape_.dtype, seed);
    layer.query = random_elements(query_elements(), shape_.dtype, seed + 1000);
    layer.query_buffer.resize(layer.query.size());
    const auto most_copied = static_cast<size_t>(
        std::max({moved_bytes(), key_bytes(), query_elements() * size_of(shape_.dtype)}));
    layer.copy_from.assign(most_copied, 1);
    layer.copy_to.assign(most_copied, 2);
    layer.kv =
        cpu_paged_kv("vec", layer.pool.data(), shape_.dtype, num_blocks(), shape_.kv_heads,
                     shape_.block_size, shape_.head_size, shape_.kv_heads * per_head(), per_head());
    return layer;
  }

  RowsView rows_in(Bytes& memory) const {
    return {.data = memory.data(),
            .dtype = shape_.dtype,
            .tokens = shape_.queries,
            .heads = query_heads(),
            .head_size = shape_.head_size,
            .token_stride = query_heads() * shape_.head_size,
            .head_stride = shape_.head_size};
  }

  // Every key is read.
  int64_t key_bytes() const {
    return shape_.tokens * shape_.kv_heads * shape_.head_size * size_of(shape_.dtype);
  }
  // A key and a value are read and written in each move.
  int64_t moved_bytes() const {
    return 4 * static_cast<int64_t>(moves_.from.size()) * shape_.head_size * size_of(shape_.dtype);
  }
  int64_t line_bytes(const PagedView& key, const PagedView& value) const {
    return line_bytes_of(key) + line_bytes_of(value);
  }
  int64_t line_bytes_of(const PagedView& blocks) const {
    constexpr int64_t kLine = 64;
    std::unordered_set<int64_t> read;
    std::unordered_set<int64_t> written;
    for (int64_t head = 0; head < blocks.num_heads; ++head) {
      for (int64_t i = moves_.starts[static_cast<size_t>(head)];
           i < moves_.starts[static_cast<size_t>(head + 1)]; ++i) {
        for (int64_t d = 0; d < blocks.head_size; ++d) {
          const auto move = static_cast<size_t>(i);
          read.insert(address_of(blocks, head, moves_.from[move], d) / kLine);
          written.insert(address_of(blocks, head, moves_.to[move], d) / kLine);
        }
      }
    }
    return kLine * static_cast<int64_t>(read.size() + written.size());
  }
  int64_t address_of(const PagedView& blocks, int64_t head, int64_t index, int64_t d) const {
    const int64_t token = kFirstToken + index;
    const int64_t block = block_table_[static_cast<size_t>(token / blocks.block_size)];
    const int64_t element = block * blocks.block_stride + head * blocks.head_stride +
                            blocks.token.offset(token % blocks.block_size) + blocks.dim.offset(d);
    return reinterpret_cast<int64_t>(blocks.data) + element * size_of(blocks.dtype);
  }

  // Multiplications and additions of all queries with all keys.
  double score_flop() const { return 2.0 * static_cast<double>(query_elements() * shape_.tokens); }
  // With those that they see.
  double causal_flop() const {
    const int64_t keys = std::accumulate(limits_.begin(), limits_.end(), int64_t{0});
    return 2.0 * static_cast<double>(keys * query_heads() * shape_.head_size);
  }
  // Of every key with every other, once.
  double pair_flop() const {
    return static_cast<double>(shape_.tokens * shape_.tokens * shape_.kv_heads * shape_.head_size);
  }

  // Of half a matrix of each query head with every key.
  double quadratic_flop() const {
    return static_cast<double>(query_heads() * shape_.tokens * shape_.head_size * shape_.head_size);
  }

  void score(const PagedView& key, GroupReduction group) {
    score_keys({.query = rows_in(layer().query),
                .key = key,
                .block_table = block_table_.data(),
                .first_token = kFirstToken,
                .tokens = shape_.tokens,
                .group = group,
                .scale = scale(),
                .scores = scores_.data()});
  }

  void accumulate(const PagedView& key) {
    accumulate_attention({.query = rows_in(layer().query),
                          .query_limits = limits_.data(),
                          .query_phases = phases_.data(),
                          .num_phases = kPhases,
                          .key = key,
                          .block_table = block_table_.data(),
                          .first_token = kFirstToken,
                          .tokens = shape_.tokens,
                          .scale = scale(),
                          .sums = scores_.data(),
                          .sums_stride = shape_.tokens});
  }

  void measure_redundancy(float threshold) {
    key_redundancy({.key = key(),
                    .block_table = block_table_.data(),
                    .first_token = kFirstToken,
                    .tokens = shape_.tokens,
                    .threshold = threshold,
                    .redundancy = scores_.data()});
  }

  void compare_directions() {
    keydiff_score({.key = key(),
                   .block_table = block_table_.data(),
                   .first_token = kFirstToken,
                   .tokens = shape_.tokens,
                   .scores = scores_.data()});
  }

  void score_expectation() {
    expected_attention_score(
        {.key = key(),
         .value = value(),
         .block_table = block_table_.data(),
         .first_token = kFirstToken,
         .tokens = shape_.tokens,
         .query = rows_in(layer().query),
         .query_positions = query_rows_.data(),
         .rope = {.frequencies = frequencies_.data(), .rotary_dim = shape_.head_size},
         .next_position = shape_.tokens,
         .scale = scale(),
         .scores = scores_.data()});
  }

  void score_triattention() {
    triattention_score({.key = key(),
                        .block_table = block_table_.data(),
                        .first_token = kFirstToken,
                        .tokens = shape_.tokens,
                        .synthetic_query = weights_.data(),
                        .norm_weights = weights_.data(),
                        .query_heads = query_heads(),
                        .rotary_dim = shape_.head_size,
                        .normalize = true,
                        .scores = scores_.data()});
  }

  void push() {
    push_queries({.query = rows_in(layer().query),
                  .rows = query_rows_.data(),
                  .entries = query_rows_.data(),
                  .count = shape_.queries,
                  .buffer = rows_in(layer().query_buffer)});
  }

  void move_survivors(const PagedView& key, const PagedView& value) {
    compact({.key = key,
             .value = value,
             .block_table = block_table_.data(),
             .first_token = kFirstToken,
             .starts = moves_.starts.data(),
             .from = moves_.from.data(),
             .to = moves_.to.data()});
  }

  Shape shape_;
  std::vector<int32_t> block_table_;
  CompactionMoves moves_;
  std::vector<Layer> layers_;
  size_t current_ = 0;
  std::vector<int64_t> limits_;
  std::vector<int32_t> phases_;
  std::vector<int64_t> query_rows_;
  std::vector<double> frequencies_;
  std::vector<float> scores_;
  std::vector<float> weights_;
};

}  // namespace

std::unique_ptr<Workload> make_eviction_workload(const Shape& shape) {
  return std::make_unique<EvictionWorkload>(shape);
}

std::vector<Shape> eviction_shapes() {
  const auto shape = [](int64_t tokens, int64_t queries, int64_t heads, int64_t group,
                        int64_t head_size, DataType dtype) {
    return Shape{.tokens = tokens,
                 .kept = 2048,
                 .queries = queries,
                 .kv_heads = heads,
                 .group = group,
                 .head_size = head_size,
                 .block_size = 128,
                 .dtype = dtype};
  };
  return {
      shape(2176, 32, 3, 3, 64, DataType::float32),
      shape(2176, 32, 3, 3, 64, DataType::bfloat16),
      shape(2176, 128, 3, 3, 64, DataType::float32),
      shape(6144, 32, 3, 3, 64, DataType::float32),
      shape(2176, 32, 8, 4, 128, DataType::bfloat16),
      shape(6144, 32, 8, 4, 128, DataType::bfloat16),
  };
}

}  // namespace phasekv::benchmarks
