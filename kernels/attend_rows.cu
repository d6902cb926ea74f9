// Bound by the tensor cores where many rows share a pass over the keys (6 query heads x rows x keys
// x head size multiplications and additions), by the bytes of keys and values where few do.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "attend_rows_plan.cuh"
#include "attend_rows_simt.cuh"
#include "attend_rows_tile.cuh"
#include "elements.cuh"
#include "launch.cuh"
#include "ops/key_range.h"
#include "phasekv/cuda.h"
#include "validate.h"
#include "views.cuh"
#include "workspace.cuh"

namespace phasekv::cuda {
namespace {

constexpr int64_t kMaxHeadSize = 256;
constexpr unsigned kListThreads = 128;
constexpr unsigned kMergeThreads = 128;

// Row i is the first of the requests between its own and that of the row before.
__global__ void __launch_bounds__(kListThreads)
    find_request_starts_kernel(const int32_t* row_requests, int64_t rows, int64_t num_requests,
                               int64_t* starts) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kListThreads + threadIdx.x;
  if (row > rows) return;
  const int64_t after = row == 0 ? 0 : int64_t{row_requests[row - 1]} + 1;
  const int64_t up_to = row == rows ? num_requests : row_requests[row];
  for (int64_t request = after; request <= up_to; ++request) starts[request] = row;
}

// A warp takes a query vector: adds up its parts, in order.
__global__ void __launch_bounds__(kMergeThreads)
    merge_parts_kernel(AttendRowsParams params, AttendGrid grid, int dims) {
  const int64_t vector =
      static_cast<int64_t>(blockIdx.x) * (kMergeThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (vector >= params.query.tokens * params.query.heads) return;
  const int64_t row = vector / params.query.heads;
  const int64_t out = offset_of_row(params.out, row, vector % params.query.heads);
  // Parts without a key of this row hold nothing.
  const auto parts =
      static_cast<int>((params.row_limits[row] + grid.keys_per_part - 1) / grid.keys_per_part);
  const float* sums = grid.partial_sums + 2 * vector * grid.parts;
  float most = -INFINITY;
  for (int part = 0; part < parts; ++part) most = fmaxf(most, sums[2 * part]);
  const float base = most == -INFINITY ? 0.0F : most;
  float total = 0.0F;
  for (int part = 0; part < parts; ++part) {
    total = fmaf(sums[2 * part + 1], exp2f(sums[2 * part] - base), total);
  }
  const float share = total == 0.0F ? 0.0F : 1.0F / total;
  const auto head_size = static_cast<int>(params.out.head_size);
  for (int dim = static_cast<int>(threadIdx.x % kWarpSize); dim < head_size; dim += kWarpSize) {
    float sum = 0.0F;
    for (int part = 0; part < parts; ++part) {
      sum = fmaf(grid.partial_outputs[(vector * grid.parts + part) * dims + dim],
                 exp2f(sums[2 * part] - base), sum);
    }
    sum *= share;
    store_vector<1>(&sum, params.out.data, params.out.dtype, out + dim);
  }
}

bool uses_tensor_cores(const AttendRowsParams& params) {
  return params.key.dtype != DataType::float32 && params.query.dtype == params.key.dtype;
}

// The head size that a kernel is compiled for, and the keys it takes at a time.
struct TileShape {
  int dims;
  int vectors;
  int keys;
};

TileShape tile_shape_of(const AttendRowsParams& params) {
  const int64_t head_size = params.key.head_size;
  if (!uses_tensor_cores(params)) {
    const int dims = head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256;
    return {dims, kSimtVectors, simt_keys(dims)};
  }
  for (const int dims : {64, 96, 128, 192}) {
    if (head_size <= dims) return {dims, kTileVectors, dims <= 128 ? 64 : 32};
  }
  return {256, kTileVectors, 16};
}

void place(const AttendRowsParams& params, const TileShape& shape, Allotment& memory,
           AttendGrid& grid) {
  const int64_t partials =
      grid.parts > 1 ? params.query.tokens * params.query.heads * grid.parts : 0;
  grid.request_starts = memory.take<int64_t>(params.num_requests + 1);
  grid.partial_sums = memory.take<float>(2 * partials);
  grid.partial_outputs = memory.take<float>(partials * shape.dims);
}

TileAlignment tile_alignment_of(const AttendRowsParams& params) {
  const bool whole_chunks = params.key.head_size % 8 == 0;
  const auto is_aligned = [&](const auto& view) {
    return whole_chunks && alignment_of(view) == 16;
  };
  return {is_aligned(params.query), is_aligned(params.key), is_aligned(params.value),
          is_aligned(params.out)};
}

dim3 extent_of(const AttendGrid& grid, const AttendRowsParams& params) {
  return dim3(blocks_for(grid.row_tiles, 1),
              static_cast<unsigned>(params.key.num_heads * grid.head_tiles),
              static_cast<unsigned>(grid.parts));
}

template <typename T, int kDims, int kKeys>
void run_tile(const AttendRowsParams& params, const AttendGrid& grid, Stream stream) {
  launch(attend_tile_kernel<T, kDims, kKeys>, extent_of(grid, params), kTileThreads,
         sizeof(TileMemory<T, kDims, kKeys>), stream, params, grid, tile_alignment_of(params));
}

template <typename T>
void run_tiles(const AttendRowsParams& params, const TileShape& shape, const AttendGrid& grid,
               Stream stream) {
  switch (shape.dims) {
    case 64:
      return run_tile<T, 64, 64>(params, grid, stream);
    case 96:
      return run_tile<T, 96, 64>(params, grid, stream);
    case 128:
      return run_tile<T, 128, 64>(params, grid, stream);
    case 192:
      return run_tile<T, 192, 32>(params, grid, stream);
    default:
      return run_tile<T, 256, 16>(params, grid, stream);
  }
}

template <int kDims>
void run_simt_tile(const AttendRowsParams& params, const AttendGrid& grid, Stream stream) {
  launch(attend_simt_kernel<kDims>, extent_of(grid, params), kSimtThreads,
         sizeof(SimtMemory<kDims>), stream, params, grid);
}

void run_simt(const AttendRowsParams& params, const TileShape& shape, const AttendGrid& grid,
              Stream stream) {
  switch (shape.dims) {
    case 64:
      return run_simt_tile<64>(params, grid, stream);
    case 128:
      return run_simt_tile<128>(params, grid, stream);
    default:
      return run_simt_tile<256>(params, grid, stream);
  }
}

void check(const AttendRowsParams& params) {
  check_device_blocks("key", params.key);
  check_query(params.query, params.key);
  check_output_rows("out", params.out);
  check_device_blocks("value", params.value);
  check_equal("out.tokens", params.out.tokens, "query", params.query.tokens);
  check_same_heads("out", params.out, "query", params.query);
  check_same_dtype("out", params.out.dtype, "query", params.query.dtype);
  check_same_blocks("value", params.value, "key", params.key);
  if (params.key.head_size > kMaxHeadSize) {
    throw Error(ErrorCode::unsupported, "key.head_size", std::to_string(params.key.head_size),
                "there are CUDA kernels of head sizes up to " + std::to_string(kMaxHeadSize));
  }
  // A tile of keys beyond the last is counted too.
  if (params.block_table_stride > (kMaxInBlock - 64) / params.key.block_size) {
    refuse("block_table_stride", params.block_table_stride, "fewer than 2^31 tokens a request");
  }
  check_scale(params.scale);
  check_not_null("block_table", params.block_table,
                 params.num_requests * params.block_table_stride);
  check_not_null("row_requests", params.row_requests, params.query.tokens);
  check_not_null("row_limits", params.row_limits, params.query.tokens);
}

}  // namespace

int64_t attend_rows_workspace_bytes(const AttendRowsParams& params) {
  check(params);
  const TileShape shape = tile_shape_of(params);
  AttendGrid grid = plan_attend_rows(params, shape.vectors, shape.keys);
  Allotment memory;
  place(params, shape, memory, grid);
  return memory.bytes();
}

void attend_rows(const AttendRowsParams& params, const Workspace& workspace, Stream stream) {
  check(params);
  if (params.query.tokens == 0) return;
  const TileShape shape = tile_shape_of(params);
  AttendGrid grid = plan_attend_rows(params, shape.vectors, shape.keys);
  Allotment memory(workspace);
  place(params, shape, memory, grid);
  memory.check("attend_rows_workspace_bytes()");
  launch(find_request_starts_kernel, dim3(blocks_for(params.query.tokens + 1, kListThreads)),
         kListThreads, 0, stream, params.row_requests, params.query.tokens, params.num_requests,
         grid.request_starts);
  if (!uses_tensor_cores(params)) {
    run_simt(params, shape, grid, stream);
  } else if (params.key.dtype == DataType::bfloat16) {
    run_tiles<__nv_bfloat16>(params, shape, grid, stream);
  } else {
    run_tiles<__half>(params, shape, grid, stream);
  }
  if (grid.parts > 1) {
    launch(merge_parts_kernel,
           dim3(blocks_for(params.query.tokens * params.query.heads, kMergeThreads / kWarpSize)),
           kMergeThreads, 0, stream, params, grid, shape.dims);
  }
}

}  // namespace phasekv::cuda
