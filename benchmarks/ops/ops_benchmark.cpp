// Speed of the copy-like ops against memcpy on the same bytes, by the same threads, in the same
// run.
//
//   ops_benchmark [--json PATH] [--filter TEXT] [--seconds S]
//
// "bytes" is what the op must read once and write once; GB/s counts each of them once, as for a
// copy. Every call works on the next of many layers, as a prefill does, so that nothing is in a
// cache from the call before. Op and memcpy take turns, and of each the median counts.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "measuring.h"
#include "phasekv/cpu.h"
#include "phasekv/layout.h"
#include "phasekv/ops.h"

namespace {

using phasekv::DataType;
using phasekv::benchmarks::name_of;
using phasekv::benchmarks::parallel_memcpy;
using phasekv::benchmarks::processor;
using phasekv::benchmarks::quantile;
using phasekv::benchmarks::seconds_of;

struct Shape {
  int64_t tokens;
  int64_t heads;
  int64_t head_size;
  int64_t block_size;
  DataType dtype;
};

struct Result {
  std::string op;
  Shape shape;
  int64_t bytes;
  double op_speed;      // GB/s
  double memcpy_speed;  // GB/s
};

// The memory of one layer: a chunk's rows, and a paged cache twice the size they need.
struct Layer {
  std::vector<char> rows;
  std::vector<char> other_rows;
  std::vector<char> pool;
  phasekv::PagedKV kv;
};

class Workload {
 public:
  explicit Workload(const Shape& shape) : shape_(shape) {
    const int64_t row = shape.heads * shape.head_size;
    bytes_ = shape.tokens * row * phasekv::size_of(shape.dtype);
    // Far more than caches hold.
    constexpr int64_t kWorkingSet = int64_t{512} << 20;
    const int64_t layers = std::max<int64_t>(4, kWorkingSet / (6 * bytes_));
    for (int64_t i = 0; i < layers; ++i) layers_.push_back(make_layer());
    // Chunks of 200 tokens, one after another from the fifth token of a request whose blocks are
    // every other one of the pool.
    constexpr int64_t kFirstToken = 5;
    constexpr int64_t kChunk = 200;
    for (int64_t i = 0; i < shape.tokens; ++i) {
      const int64_t at = kFirstToken + i;
      slots_.push_back(at / shape.block_size * 2 * shape.block_size + at % shape.block_size);
      rows_.push_back(i);
      weights_.push_back(0.5F);
      if (i % kChunk == 0) {
        segment_starts_.push_back(i);
        segment_deltas_.push_back(1000 + i);
      }
      deltas_.push_back(segment_deltas_.back());
    }
    mean_.assign(segment_deltas_.size() * static_cast<size_t>(row), 0.25F);
    segment_starts_.push_back(shape.tokens);
    frequencies_ = phasekv::rope_frequencies({.theta = 1e5, .rotary_dim = shape.head_size});
  }

  int64_t bytes() const { return bytes_; }
  void next_layer() { current_ = (current_ + 1) % layers_.size(); }

  void copy() { parallel_memcpy(layer().other_rows.data(), layer().rows.data(), bytes_); }

  void gather(const phasekv::PagedView& blocks) {
    phasekv::gather_blocks({.blocks = blocks, .slots = slots_.data(), .rows = other_rows()});
  }

  void scatter(const phasekv::PagedView& blocks) {
    phasekv::scatter_blocks({.rows = rows(), .slots = slots_.data(), .blocks = blocks});
  }

  void rotate() {
    phasekv::rotate_keys(
        {.keys = rows(), .deltas = deltas_.data(), .rope = rope(), .out = other_rows()});
  }

  void shift_keys() {
    phasekv::ApplyShiftParams params = shift_params(key());
    params.deltas = segment_deltas_.data();
    params.rope = rope();
    phasekv::apply_shift(params);
  }

  void move_keys() {
    phasekv::ApplyShiftParams params = shift_params(key());
    params.deltas = segment_deltas_.data();
    params.rope = rope();
    params.mean = nullptr;
    params.weights = nullptr;
    phasekv::apply_shift(params);
  }

  void shift_values() { phasekv::apply_shift(shift_params(value())); }

  const phasekv::PagedView& key() { return layer().kv.key; }
  const phasekv::PagedView& value() { return layer().kv.value; }

 private:
  Layer& layer() { return layers_[current_]; }

  Layer make_layer() const {
    // Ordinary numbers in every type: 0x3c3c3c3c is 0.0115, and 0x3c3c 0.0115 or 1.06.
    constexpr char kFill = 0x3c;
    Layer layer;
    layer.rows.assign(static_cast<size_t>(bytes_), kFill);
    layer.other_rows.assign(static_cast<size_t>(bytes_), kFill);
    const int64_t used_blocks = (shape_.tokens + shape_.block_size - 1) / shape_.block_size + 1;
    const int64_t blocks = 2 * used_blocks;
    const int64_t head_stride = 2 * shape_.block_size * shape_.head_size;
    const int64_t elements = blocks * shape_.heads * head_stride;
    layer.pool.assign(static_cast<size_t>(elements * phasekv::size_of(shape_.dtype)), kFill);
    layer.kv = phasekv::cpu_paged_kv("vec", layer.pool.data(), shape_.dtype, blocks, shape_.heads,
                                     shape_.block_size, shape_.head_size,
                                     shape_.heads * head_stride, head_stride);
    return layer;
  }

  phasekv::RowsView rows_in(std::vector<char>& memory) const {
    return {.data = memory.data(),
            .dtype = shape_.dtype,
            .tokens = shape_.tokens,
            .heads = shape_.heads,
            .head_size = shape_.head_size,
            .token_stride = shape_.heads * shape_.head_size,
            .head_stride = shape_.head_size};
  }
  phasekv::RowsView rows() { return rows_in(layer().rows); }
  phasekv::RowsView other_rows() { return rows_in(layer().other_rows); }
  phasekv::RopeView rope() const {
    return {.frequencies = frequencies_.data(), .rotary_dim = shape_.head_size};
  }

  phasekv::ApplyShiftParams shift_params(const phasekv::PagedView& blocks) {
    phasekv::ApplyShiftParams params;
    params.cached = rows();
    params.cached_rows = rows_.data();
    params.slots = slots_.data();
    params.segment_starts = segment_starts_.data();
    params.num_segments = static_cast<int64_t>(segment_deltas_.size());
    params.mean = mean_.data();
    params.weights = weights_.data();
    params.blocks = blocks;
    return params;
  }

  Shape shape_;
  int64_t bytes_ = 0;
  std::vector<Layer> layers_;
  size_t current_ = 0;
  std::vector<int64_t> slots_;
  std::vector<int64_t> rows_;
  std::vector<int64_t> segment_starts_;
  std::vector<int64_t> segment_deltas_;
  std::vector<int64_t> deltas_;
  std::vector<float> weights_;
  std::vector<float> mean_;
  std::vector<double> frequencies_;
};

Result measure(const std::string& op, const Shape& shape, double seconds, Workload& workload,
               const std::function<void()>& run) {
  std::vector<double> op_times;
  std::vector<double> copy_times;
  double spent = 0.0;
  while (spent < seconds || op_times.size() < 9) {
    workload.next_layer();
    op_times.push_back(seconds_of(run));
    workload.next_layer();
    copy_times.push_back(seconds_of([&] { workload.copy(); }));
    spent += op_times.back() + copy_times.back();
  }
  const double gigabytes = static_cast<double>(workload.bytes()) * 1e-9;
  return {op, shape, workload.bytes(), gigabytes / quantile(op_times, 0.5),
          gigabytes / quantile(copy_times, 0.5)};
}

std::vector<Result> measure_all(const std::string& filter, double seconds) {
  const std::vector<Shape> shapes = {
      {4096, 3, 64, 128, DataType::float32},   {4096, 3, 64, 128, DataType::bfloat16},
      {4096, 3, 64, 32, DataType::float32},    {4096, 8, 128, 128, DataType::float32},
      {4096, 8, 128, 128, DataType::bfloat16}, {4096, 8, 128, 128, DataType::float16},
      {32768, 8, 128, 128, DataType::float32},
  };
  std::vector<Result> results;
  std::printf("%-14s %7s %5s %4s %5s %-8s %10s %8s %8s %6s\n", "op", "tokens", "heads", "head",
              "block", "dtype", "bytes", "GB/s", "memcpy", "share");
  for (const Shape& shape : shapes) {
    Workload workload(shape);
    const std::vector<std::pair<std::string, std::function<void()>>> ops = {
        {"gather_k", [&] { workload.gather(workload.key()); }},
        {"gather_v", [&] { workload.gather(workload.value()); }},
        {"scatter_k", [&] { workload.scatter(workload.key()); }},
        {"scatter_v", [&] { workload.scatter(workload.value()); }},
        {"rotate_keys", [&] { workload.rotate(); }},
        {"apply_shift_k", [&] { workload.shift_keys(); }},
        {"move_k", [&] { workload.move_keys(); }},
        {"apply_shift_v", [&] { workload.shift_values(); }},
    };
    for (const auto& [name, run] : ops) {
      if (name.find(filter) == std::string::npos) continue;
      const Result result = measure(name, shape, seconds, workload, run);
      std::printf("%-14s %7lld %5lld %4lld %5lld %-8s %10lld %8.2f %8.2f %5.0f%%\n", name.c_str(),
                  static_cast<long long>(shape.tokens), static_cast<long long>(shape.heads),
                  static_cast<long long>(shape.head_size), static_cast<long long>(shape.block_size),
                  name_of(shape.dtype), static_cast<long long>(result.bytes), result.op_speed,
                  result.memcpy_speed, 100.0 * result.op_speed / result.memcpy_speed);
      std::fflush(stdout);
      results.push_back(result);
    }
  }
  return results;
}

void write_json(const std::string& path, const std::vector<Result>& results) {
  std::ofstream out(path);
  out << "{\n  \"machine\": {\"processor\": \"" << processor()
      << "\", \"threads\": " << omp_get_max_threads() << ", \"cpu_isa\": \""
      << phasekv::name_of(phasekv::active_cpu_isa()) << "\"},\n  \"rows\": [\n";
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& result = results[i];
    out << "    {\"op\": \"" << result.op << "\", \"tokens\": " << result.shape.tokens
        << ", \"kv_heads\": " << result.shape.heads << ", \"head_size\": " << result.shape.head_size
        << ", \"block_size\": " << result.shape.block_size << ", \"dtype\": \""
        << name_of(result.shape.dtype) << "\", \"bytes\": " << result.bytes
        << ", \"gb_per_s\": " << result.op_speed << ", \"memcpy_gb_per_s\": " << result.memcpy_speed
        << ", \"share\": " << result.op_speed / result.memcpy_speed << "}"
        << (i + 1 < results.size() ? "," : "") << "\n";
  }
  out << "  ]\n}\n";
  if (!out.flush()) {
    std::cerr << "cannot write " << path << "\n";
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string json;
  std::string filter;
  double seconds = 0.5;
  omp_set_num_threads(1);
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (i + 1 == argc) {
      std::cerr
          << "usage: ops_benchmark [--json PATH] [--filter TEXT] [--seconds S] [--threads N]\n";
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
  std::printf("%s, %d threads, %s\n", processor().c_str(), omp_get_max_threads(),
              std::string(phasekv::name_of(phasekv::active_cpu_isa())).c_str());
  const std::vector<Result> results = measure_all(filter, seconds);
  if (!json.empty()) write_json(json, results);
  return 0;
}
