#include "copy_workload.h"

#include <algorithm>

#include "bytes.h"
#include "measuring.h"
#include "phasekv/layout.h"
#include "phasekv/ops.h"

namespace phasekv::benchmarks {
namespace {

// Chunks of 200 tokens, one after another from the fifth token of a request whose blocks are every
// other one of the pool; every tenth token is a probe.
constexpr int64_t kFirstToken = 5;
constexpr int64_t kChunk = 200;
constexpr int64_t kTokensPerProbe = 10;

// Far more than caches hold.
constexpr int64_t kWorkingSet = int64_t{256} << 20;

// The memory of one layer: a chunk's rows, and a paged cache twice the size they need.
struct Layer {
  Bytes rows;
  Bytes other_rows;
  Bytes codes;
  Bytes scales;
  Bytes zero_points;
  Bytes pool;
  PagedKV kv;
};

class CopyWorkload final : public Workload {
 public:
  explicit CopyWorkload(const Shape& shape)
      : shape_(shape), bytes_(shape.tokens * row_size() * size_of(shape.dtype)) {
    const int64_t layers = std::max<int64_t>(3, kWorkingSet / (6 * bytes_));
    for (int64_t i = 0; i < layers; ++i) layers_.push_back(make_layer());
    for (int64_t i = 0; i < shape.tokens; ++i) {
      const int64_t at = kFirstToken + i;
      slots_.push_back(at / shape.block_size * 2 * shape.block_size + at % shape.block_size);
      rows_.push_back(i);
      if (i % kChunk == 0) {
        chunk_starts_.push_back(i);
        chunk_probes_.push_back(static_cast<int64_t>(probes_.size()));
        chunk_deltas_.push_back(1000 + i);
      }
      deltas_.push_back(chunk_deltas_.back());
      if (i % kTokensPerProbe == 3) {
        probes_.push_back(i);
        probe_deltas_.push_back(chunk_deltas_.back());
      }
    }
    chunk_starts_.push_back(shape.tokens);
    chunk_probes_.push_back(static_cast<int64_t>(probes_.size()));
    weights_.assign(static_cast<size_t>(shape.tokens), 0.5F);
    mean_.assign(chunk_deltas_.size() * static_cast<size_t>(row_size()), 0.25F);
    frequencies_ = rope_frequencies({.theta = 1e5, .rotary_dim = shape.head_size});
  }

  const Shape& shape() const override { return shape_; }
  void next_layer() override { current_ = (current_ + 1) % layers_.size(); }
  void copy(int64_t bytes) override {
    parallel_memcpy(layer().other_rows.data(), layer().rows.data(), bytes);
  }

  std::vector<Op> ops() override {
    std::vector<Op> ops;
    const double moved = 2.0 * static_cast<double>(bytes_);
    const auto add = [&](const char* name, const char* adjacent, double work,
                         std::function<void()> run) {
      ops.push_back({.name = name, .adjacent = adjacent, .work = work, .run = std::move(run)});
    };
    // Keys and values are the two arrangements that a block may have.
    add("gather_blocks", "dimensions", moved, [this] { gather(layer().kv.value); });
    add("gather_blocks", "tokens", moved, [this] { gather(layer().kv.key); });
    add("scatter_blocks", "dimensions", moved, [this] { scatter(layer().kv.value); });
    add("scatter_blocks", "tokens", moved, [this] { scatter(layer().kv.key); });
    add("apply_shift", "dimensions", moved, [this] { apply_shift(shift(layer().kv.value)); });
    add("apply_shift", "tokens", moved, [this] { apply_shift(shift(layer().kv.key)); });
    add("apply_shift rotated", "dimensions", moved,
        [this] { apply_shift(rotated(shift(layer().kv.value))); });
    add("apply_shift rotated", "tokens", moved,
        [this] { apply_shift(rotated(shift(layer().kv.key))); });
    add("apply_shift no mean", "tokens", moved,
        [this] { apply_shift(without_mean(rotated(shift(layer().kv.key)))); });
    add("rotate_keys", "", moved, [this] { rotate(); });
    add("divergence", "", moved, [this] { diverge(); });
    const auto converted = static_cast<double>(bytes_ + code_bytes() + 2 * group_bytes());
    for (const GroupAxis axis : {GroupAxis::tokens, GroupAxis::channels}) {
      const char* adjacent = axis == GroupAxis::tokens ? "tokens" : "dimensions";
      add("quantize", adjacent, converted,
          [this, axis] { quantize({.rows = rows(), .out = quantized(axis)}); });
      add("dequantize", adjacent, converted,
          [this, axis] { dequantize({.quantized = quantized(axis), .rows = other_rows()}); });
    }
    add("mean_residual", "", mean_residual_bytes(), [this] { take_mean(false); });
    add("mean_residual rotated", "", mean_residual_bytes(), [this] { take_mean(true); });
    return ops;
  }

 private:
  int64_t row_size() const { return shape_.kv_heads * shape_.head_size; }
  Layer& layer() { return layers_[current_]; }

  // To kBits in groups of kGroupSize, by which the shapes' tokens and head sizes divide.
  static constexpr int64_t kBits = 2;
  static constexpr int64_t kGroupSize = 32;
  int64_t code_bytes() const { return shape_.tokens * row_size() * kBits / 8; }
  int64_t group_bytes() const { return shape_.tokens * row_size() / kGroupSize * 2; }

  double mean_residual_bytes() const {
    return static_cast<double>(row_size()) *
           (2.0 * static_cast<double>(probes_.size()) * static_cast<double>(size_of(shape_.dtype)) +
            4.0 * static_cast<double>(chunk_deltas_.size()));
  }

  Layer make_layer() const {
    // Ordinary numbers in every type: 0x3c3c3c3c is 0.0115, and 0x3c3c 0.0115 or 1.06.
    constexpr char kFill = 0x3c;
    Layer layer;
    layer.rows.assign(static_cast<size_t>(bytes_), kFill);
    layer.other_rows.assign(static_cast<size_t>(bytes_), kFill);
    layer.codes.assign(static_cast<size_t>(code_bytes()), kFill);
    layer.scales.assign(static_cast<size_t>(group_bytes()), kFill);
    layer.zero_points.assign(static_cast<size_t>(group_bytes()), kFill);
    const int64_t blocks = 2 * ((kFirstToken + shape_.tokens) / shape_.block_size + 1);
    const int64_t head_stride = 2 * shape_.block_size * shape_.head_size;
    const int64_t elements = blocks * shape_.kv_heads * head_stride;
    layer.pool.assign(static_cast<size_t>(elements * size_of(shape_.dtype)), kFill);
    layer.kv = cpu_paged_kv("vec", layer.pool.data(), shape_.dtype, blocks, shape_.kv_heads,
                            shape_.block_size, shape_.head_size, shape_.kv_heads * head_stride,
                            head_stride);
    return layer;
  }

  RowsView rows_in(Bytes& memory) const {
    return {.data = memory.data(),
            .dtype = shape_.dtype,
            .tokens = shape_.tokens,
            .heads = shape_.kv_heads,
            .head_size = shape_.head_size,
            .token_stride = row_size(),
            .head_stride = shape_.head_size};
  }
  RowsView rows() { return rows_in(layer().rows); }
  RowsView other_rows() { return rows_in(layer().other_rows); }
  QuantizedRows quantized(GroupAxis axis) {
    return {.codes = reinterpret_cast<uint32_t*>(layer().codes.data()),
            .scales = reinterpret_cast<uint16_t*>(layer().scales.data()),
            .zero_points = reinterpret_cast<uint16_t*>(layer().zero_points.data()),
            .tokens = shape_.tokens,
            .heads = shape_.kv_heads,
            .head_size = shape_.head_size,
            .bits = kBits,
            .group_size = kGroupSize,
            .axis = axis};
  }
  RopeView rope() const {
    return {.frequencies = frequencies_.data(), .rotary_dim = shape_.head_size};
  }

  void gather(const PagedView& blocks) {
    gather_blocks({.blocks = blocks, .slots = slots_.data(), .rows = other_rows()});
  }
  void scatter(const PagedView& blocks) {
    scatter_blocks({.rows = rows(), .slots = slots_.data(), .blocks = blocks});
  }
  void rotate() {
    rotate_keys({.keys = rows(), .deltas = deltas_.data(), .rope = rope(), .out = other_rows()});
  }
  void diverge() {
    divergence({.fresh = rows(), .cached = other_rows(), .out = divergences_.data()});
  }
  void take_mean(bool is_rotated) {
    MeanResidualParams params;
    params.fresh = rows();
    params.cached = other_rows();
    params.fresh_rows = probes_.data();
    params.cached_rows = probes_.data();
    params.segment_starts = chunk_probes_.data();
    params.num_segments = static_cast<int64_t>(chunk_deltas_.size());
    if (is_rotated) params.cached_deltas = probe_deltas_.data();
    params.rope = rope();
    params.out = mean_.data();
    mean_residual(params);
  }

  ApplyShiftParams shift(const PagedView& blocks) {
    ApplyShiftParams params;
    params.cached = rows();
    params.cached_rows = rows_.data();
    params.slots = slots_.data();
    params.segment_starts = chunk_starts_.data();
    params.num_segments = static_cast<int64_t>(chunk_deltas_.size());
    params.mean = mean_.data();
    params.weights = weights_.data();
    params.blocks = blocks;
    return params;
  }
  ApplyShiftParams rotated(ApplyShiftParams params) const {
    params.deltas = chunk_deltas_.data();
    params.rope = rope();
    return params;
  }
  static ApplyShiftParams without_mean(ApplyShiftParams params) {
    params.mean = nullptr;
    params.weights = nullptr;
    return params;
  }

  Shape shape_;
  int64_t bytes_;  // of all rows
  std::vector<Layer> layers_;
  size_t current_ = 0;
  std::vector<int64_t> slots_;
  std::vector<int64_t> rows_;
  std::vector<int64_t> deltas_;
  std::vector<float> weights_;
  std::vector<int64_t> chunk_starts_;
  std::vector<int64_t> chunk_deltas_;
  std::vector<int64_t> chunk_probes_;  // where its probes begin
  std::vector<int64_t> probes_;
  std::vector<int64_t> probe_deltas_;
  std::vector<float> mean_;
  std::vector<float> divergences_ = std::vector<float>(static_cast<size_t>(shape_.tokens));
  std::vector<double> frequencies_;
};

}  // namespace

std::unique_ptr<Workload> make_copy_workload(const Shape& shape) {
  return std::make_unique<CopyWorkload>(shape);
}

std::vector<Shape> copy_shapes() {
  const auto shape = [](int64_t tokens, int64_t heads, int64_t head_size, int64_t block_size,
                        DataType dtype) {
    return Shape{.tokens = tokens,
                 .kv_heads = heads,
                 .head_size = head_size,
                 .block_size = block_size,
                 .dtype = dtype};
  };
  return {
      shape(4096, 3, 64, 128, DataType::float32),   shape(4096, 3, 64, 128, DataType::bfloat16),
      shape(4096, 3, 64, 32, DataType::float32),    shape(4096, 8, 128, 128, DataType::float32),
      shape(4096, 8, 128, 128, DataType::bfloat16), shape(4096, 8, 128, 128, DataType::float16),
  };
}

}  // namespace phasekv::benchmarks
