// Speed of the ops of eviction, each against what bounds it, measured in the same run and turn by
// turn: products against dot products in the closest cache, moves against memcpy of the same bytes.
//
//   eviction_benchmark [--json PATH] [--filter TEXT] [--seconds S] [--threads N]
//
// Every call works on the next of many layers, as an eviction does, so that nothing is in a cache
// from the call before. Of the times the median counts; the spread is that of the middle 80 %.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "measuring.h"
#include "phasekv/cpu.h"
#include "phasekv/layout.h"
#include "phasekv/ops.h"

namespace phasekv::benchmarks {
namespace {

struct Shape {
  int64_t tokens;
  int64_t kept;
  int64_t queries;
  int64_t kv_heads;
  int64_t group;
  int64_t head_size;
  int64_t block_size;
  DataType dtype;
};

struct Result {
  std::string op;
  Shape shape;
  double work;       // FLOP or bytes
  const char* unit;  // of the rates, 1e9 of them a second
  double rate;
  double bound;
  double milliseconds;
  double fastest_tenth;
  double slowest_tenth;
};

float to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Random numbers of about unit size in any type, made of bits.
void fill(std::vector<char>& memory, DataType dtype, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<uint32_t> some;
  for (int i = 0; i < 4093; ++i) {
    const float x = normal(generator);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    some.push_back(bits);
  }
  const int64_t elements = static_cast<int64_t>(memory.size()) / size_of(dtype);
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t bits = some[generator() % some.size()];
    if (dtype == DataType::float32) {
      std::memcpy(memory.data() + 4 * i, &bits, 4);
    } else if (dtype == DataType::bfloat16) {
      const auto half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(memory.data() + 2 * i, &half, 2);
    } else {
      const auto half = static_cast<_Float16>(to_float(bits));
      std::memcpy(memory.data() + 2 * i, &half, 2);
    }
  }
}

struct Layer {
  std::vector<char> pool;
  std::vector<char> copy_from;
  std::vector<char> copy_to;
  PagedKV kv;
};

// A request in every layer, on every other block from the fifth token of its first one.
class Workload {
 public:
  explicit Workload(const Shape& shape) : shape_(shape) {
    constexpr int64_t kWorkingSet = int64_t{256} << 20;
    for (int64_t at = 0; at < kFirstToken + shape.tokens; at += shape.block_size) {
      block_table_.push_back(static_cast<int32_t>(2 * block_table_.size() + 1));
    }
    std::mt19937 generator(1);
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      std::vector<int64_t> all(static_cast<size_t>(shape.tokens));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), generator);
      std::sort(all.begin(), all.begin() + shape.kept);
      kept_.insert(kept_.end(), all.begin(), all.begin() + shape.kept);
    }
    moves_ = plan_compaction(kept_, shape.kv_heads, shape.tokens);
    const int64_t layers = std::max<int64_t>(3, kWorkingSet / pool_bytes());
    for (int64_t i = 0; i < layers; ++i) layers_.push_back(make_layer(static_cast<uint32_t>(i)));
    query_.resize(static_cast<size_t>(shape.queries * query_heads() * shape.head_size * 4));
    fill(query_, DataType::float32, 77);
    for (int64_t i = 0; i < shape.queries; ++i) {
      limits_.push_back(shape.tokens - shape.queries + i + 1);
      phases_.push_back(static_cast<int32_t>(i * 4 / shape.queries));
      rows_.push_back(i);
    }
    scores_.resize(static_cast<size_t>(4 * shape.kv_heads * shape.tokens));
    weights_.assign(static_cast<size_t>(query_heads() * shape.head_size), 0.1F);
    buffer_.resize(query_.size());
  }

  int64_t query_heads() const { return shape_.kv_heads * shape_.group; }
  int64_t moved_bytes() const {
    return 2 * static_cast<int64_t>(moves_.from.size()) * shape_.head_size * size_of(shape_.dtype);
  }
  int64_t key_bytes() const {
    return shape_.tokens * shape_.kv_heads * shape_.head_size * size_of(shape_.dtype);
  }
  // Multiplications and additions of all queries with all keys that they see.
  double score_flop() const {
    return 2.0 *
           static_cast<double>(shape_.queries * query_heads() * shape_.tokens * shape_.head_size);
  }
  double causal_flop() const {
    int64_t keys = 0;
    for (const int64_t limit : limits_) keys += limit;
    return 2.0 * static_cast<double>(keys * query_heads() * shape_.head_size);
  }
  double pair_flop() const {
    return 2.0 *
           static_cast<double>(shape_.tokens * shape_.tokens * shape_.kv_heads * shape_.head_size);
  }

  void next_layer() { current_ = (current_ + 1) % layers_.size(); }

  void score(GroupReduction group) {
    ScoreKeysParams params;
    params.query = query();
    params.key = layer().kv.key;
    params.block_table = block_table_.data();
    params.first_token = kFirstToken;
    params.tokens = shape_.tokens;
    params.group = group;
    params.scale = scale();
    params.scores = scores_.data();
    score_keys(params);
  }

  void accumulate() {
    AccumulateAttentionParams params;
    params.query = query();
    params.query_limits = limits_.data();
    params.query_phases = phases_.data();
    params.num_phases = 4;
    params.key = layer().kv.key;
    params.block_table = block_table_.data();
    params.first_token = kFirstToken;
    params.tokens = shape_.tokens;
    params.scale = scale();
    params.sums = scores_.data();
    params.sums_stride = shape_.tokens;
    accumulate_attention(params);
  }

  void measure_redundancy(float threshold) {
    KeyRedundancyParams params;
    params.key = layer().kv.key;
    params.block_table = block_table_.data();
    params.first_token = kFirstToken;
    params.tokens = shape_.tokens;
    params.threshold = threshold;
    params.redundancy = scores_.data();
    key_redundancy(params);
  }

  void score_triattention() {
    TriattentionScoreParams params;
    params.key = layer().kv.key;
    params.block_table = block_table_.data();
    params.first_token = kFirstToken;
    params.tokens = shape_.tokens;
    params.synthetic_query = weights_.data();
    params.norm_weights = weights_.data();
    params.query_heads = query_heads();
    params.rotary_dim = shape_.head_size;
    params.normalize = true;
    params.scores = scores_.data();
    triattention_score(params);
  }

  void push() {
    push_queries({.query = query(),
                  .rows = rows_.data(),
                  .entries = rows_.data(),
                  .count = shape_.queries,
                  .buffer = rows_in(buffer_)});
  }

  // The layout as it is, or that of the keys or that of the values for both.
  void move(const PagedView& key, const PagedView& value) {
    compact({.key = key,
             .value = value,
             .block_table = block_table_.data(),
             .first_token = kFirstToken,
             .starts = moves_.starts.data(),
             .from = moves_.from.data(),
             .to = moves_.to.data()});
  }
  const PagedView& key() { return layer().kv.key; }
  const PagedView& value() { return layer().kv.value; }
  // The other half of each block in the arrangement of the keys, or of the values.
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

  void copy(int64_t bytes) {
    parallel_memcpy(layer().copy_to.data(), layer().copy_from.data(), bytes);
  }

 private:
  static constexpr int64_t kFirstToken = 5;

  Layer& layer() { return layers_[current_]; }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(shape_.head_size)); }
  int64_t per_head() const { return 2 * shape_.block_size * shape_.head_size; }
  int64_t num_blocks() const { return 2 * static_cast<int64_t>(block_table_.size()); }
  int64_t pool_bytes() const {
    return num_blocks() * shape_.kv_heads * per_head() * size_of(shape_.dtype);
  }

  Layer make_layer(uint32_t seed) const {
    Layer layer;
    layer.pool.resize(static_cast<size_t>(pool_bytes()));
    fill(layer.pool, shape_.dtype, seed);
    const auto copied = static_cast<size_t>(std::max(
        {moved_bytes(), key_bytes(), shape_.queries * query_heads() * shape_.head_size * 4}));
    layer.copy_from.assign(copied, 1);
    layer.copy_to.assign(copied, 2);
    layer.kv =
        cpu_paged_kv("vec", layer.pool.data(), shape_.dtype, num_blocks(), shape_.kv_heads,
                     shape_.block_size, shape_.head_size, shape_.kv_heads * per_head(), per_head());
    return layer;
  }

  RowsView rows_in(std::vector<char>& memory) const {
    return {.data = memory.data(),
            .dtype = DataType::float32,
            .tokens = shape_.queries,
            .heads = query_heads(),
            .head_size = shape_.head_size,
            .token_stride = query_heads() * shape_.head_size,
            .head_stride = shape_.head_size};
  }
  RowsView query() { return rows_in(query_); }

  Shape shape_;
  std::vector<int32_t> block_table_;
  std::vector<int64_t> kept_;
  CompactionMoves moves_;
  std::vector<Layer> layers_;
  size_t current_ = 0;
  std::vector<char> query_;
  std::vector<char> buffer_;
  std::vector<int64_t> limits_;
  std::vector<int32_t> phases_;
  std::vector<int64_t> rows_;
  std::vector<float> scores_;
  std::vector<float> weights_;
};

struct Op {
  std::string name;
  double flop;    // 0: bound by the bytes that it moves
  int64_t bytes;  // read once and written once, or only read, as by memcpy
  std::function<void()> run;
};

Result measure(const Op& op, const Shape& shape, double seconds, Workload& workload) {
  std::vector<double> times;
  std::vector<double> bounds;
  double spent = 0.0;
  while (spent < seconds || times.size() < 11) {
    workload.next_layer();
    times.push_back(seconds_of(op.run));
    spent += times.back();
    if (op.flop > 0.0) {
      if (times.size() % 8 != 1) continue;
      bounds.push_back(op.flop / (dot_product_rate() * omp_get_max_threads()));
    } else {
      workload.next_layer();
      bounds.push_back(seconds_of([&] { workload.copy(op.bytes); }));
      spent += bounds.back();
    }
  }
  const double work = op.flop > 0.0 ? op.flop : static_cast<double>(op.bytes);
  const double time = quantile(times, 0.5);
  return {op.name,
          shape,
          work,
          op.flop > 0.0 ? "GFLOP/s" : "GB/s",
          1e-9 * work / time,
          1e-9 * work / quantile(bounds, 0.5),
          1e3 * time,
          1e3 * quantile(times, 0.1),
          1e3 * quantile(times, 0.9)};
}

void print(const Result& result) {
  const Shape& shape = result.shape;
  std::printf(
      "%-24s %6lld %5lld %5lld %3lld x %lld %4lld %-8s %9.3f %9.3f %9.3f %8.2f %8.2f %-7s"
      " %4.0f%%\n",
      result.op.c_str(), static_cast<long long>(shape.tokens), static_cast<long long>(shape.kept),
      static_cast<long long>(shape.queries), static_cast<long long>(shape.kv_heads),
      static_cast<long long>(shape.group), static_cast<long long>(shape.head_size),
      name_of(shape.dtype), result.milliseconds, result.fastest_tenth, result.slowest_tenth,
      result.rate, result.bound, result.unit, 100.0 * result.rate / result.bound);
  std::fflush(stdout);
}

std::vector<Result> measure_all(const std::string& filter, double seconds) {
  // SmolLM2-135M and Qwen3-8B at a budget of 2,048 and a stride of 128, and at the end of a prompt.
  const std::vector<Shape> shapes = {
      {2176, 2048, 32, 3, 3, 64, 128, DataType::float32},
      {2176, 2048, 32, 3, 3, 64, 128, DataType::bfloat16},
      {2176, 2048, 128, 3, 3, 64, 128, DataType::float32},
      {6144, 2048, 32, 3, 3, 64, 128, DataType::float32},
      {2176, 2048, 32, 8, 4, 128, 128, DataType::bfloat16},
      {6144, 2048, 32, 8, 4, 128, 128, DataType::bfloat16},
  };
  std::vector<Result> results;
  std::printf("%-24s %6s %5s %5s %7s %4s %-8s %9s %9s %9s %8s %8s %-7s %5s\n", "op", "tokens",
              "kept", "query", "heads", "size", "dtype", "ms", "10 %", "90 %", "rate", "bound", "",
              "share");
  for (const Shape& shape : shapes) {
    Workload workload(shape);
    const std::vector<Op> ops = {
        {"score_keys max_logit", workload.score_flop(), 0,
         [&] { workload.score(GroupReduction::max_logit); }},
        {"score_keys max", workload.score_flop(), 0, [&] { workload.score(GroupReduction::max); }},
        {"score_keys mean", workload.score_flop(), 0,
         [&] { workload.score(GroupReduction::mean); }},
        {"accumulate_attention", workload.causal_flop(), 0, [&] { workload.accumulate(); }},
        {"key_redundancy distinct", workload.pair_flop(), 0,
         [&] { workload.measure_redundancy(2.0F); }},
        {"key_redundancy similar", workload.pair_flop(), 0,
         [&] { workload.measure_redundancy(0.1F); }},
        {"triattention_score", 0.0, workload.key_bytes(), [&] { workload.score_triattention(); }},
        {"push_queries", 0.0, shape.queries * workload.query_heads() * shape.head_size * 4,
         [&] { workload.push(); }},
        {"compact", 0.0, workload.moved_bytes(),
         [&] { workload.move(workload.key(), workload.value()); }},
        {"compact transposed", 0.0, workload.moved_bytes(),
         [&] { workload.move(workload.key(), workload.value_as_key()); }},
        {"compact contiguous", 0.0, workload.moved_bytes(),
         [&] { workload.move(workload.key_as_value(), workload.value()); }},
    };
    for (const Op& op : ops) {
      if (op.name.find(filter) == std::string::npos) continue;
      results.push_back(measure(op, shape, seconds, workload));
      print(results.back());
    }
  }
  return results;
}

void write_json(const std::string& path, const std::vector<Result>& results) {
  std::ofstream out(path);
  out << "{\n  \"machine\": {\"processor\": \"" << processor()
      << "\", \"threads\": " << omp_get_max_threads() << ", \"cpu_isa\": \""
      << phasekv::name_of(active_cpu_isa()) << "\"},\n  \"rows\": [\n";
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& result = results[i];
    const Shape& shape = result.shape;
    out << "    {\"op\": \"" << result.op << "\", \"tokens\": " << shape.tokens
        << ", \"kept\": " << shape.kept << ", \"queries\": " << shape.queries
        << ", \"kv_heads\": " << shape.kv_heads << ", \"group\": " << shape.group
        << ", \"head_size\": " << shape.head_size << ", \"block_size\": " << shape.block_size
        << ", \"dtype\": \"" << name_of(shape.dtype)
        << "\", \"milliseconds\": " << result.milliseconds
        << ", \"fastest_tenth\": " << result.fastest_tenth
        << ", \"slowest_tenth\": " << result.slowest_tenth << ", \"work\": " << result.work
        << ", \"unit\": \"" << result.unit << "\", \"rate\": " << result.rate
        << ", \"bound\": " << result.bound << ", \"share\": " << result.rate / result.bound << "}"
        << (i + 1 < results.size() ? "," : "") << "\n";
  }
  out << "  ]\n}\n";
  if (!out.flush()) {
    std::cerr << "cannot write " << path << "\n";
    std::exit(1);
  }
}

}  // namespace
}  // namespace phasekv::benchmarks

int main(int argc, char** argv) {
  std::string json;
  std::string filter;
  double seconds = 0.5;
  omp_set_num_threads(1);
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (i + 1 == argc) {
      std::cerr << "usage: eviction_benchmark [--json PATH] [--filter TEXT] [--seconds S] "
                   "[--threads N]\n";
      return 2;
    }
    const std::string value = argv[++i];
    if (option == "--json") {
      json = value;
    } else if (option == "--filter") {
      filter = value;
    } else if (option == "--seconds") {
      seconds = std::atof(value.c_str());
    } else if (option == "--threads") {
      omp_set_num_threads(std::max(1, std::atoi(value.c_str())));
    } else {
      std::cerr << "unknown option " << option << "\n";
      return 2;
    }
  }
  std::printf("%s, %d threads, %s\n", phasekv::benchmarks::processor().c_str(),
              omp_get_max_threads(),
              std::string(phasekv::name_of(phasekv::active_cpu_isa())).c_str());
  const auto results = phasekv::benchmarks::measure_all(filter, seconds);
  if (!json.empty()) phasekv::benchmarks::write_json(json, results);
  return 0;
}
