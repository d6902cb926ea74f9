// Each key is read twice, the second time from the L2 cache where the request's keys of a layer
// have room in it: first every query head learns the maximum and the sum of its weights, then the
// weights are added up. Few queries are bound by the bytes of the keys, many by the tensor cores (4
// query heads x keys attended x head size multiplications and additions).
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_mass.cuh"
#include "key_tile.cuh"
#include "launch.cuh"
#include "ops/key_range.h"
#include "softmax.cuh"
#include "validate.h"
#include "views.cuh"
#include "warp.cuh"

namespace phasekv::cuda {
namespace {

constexpr int kListThreads = 256;
constexpr unsigned kMergeThreads = 128;
// Queries are taken in rounds, so that what is known of the parts of their keys has room.
constexpr int64_t kMostPartBytes = int64_t{64} << 20;

// What a warp finds of the weights of one row, or of one row's keys that one warp has.
struct RowSum {
  float maximum;  // of the scores, in units of log 2
  float sum;      // of the weights relative to it; at the end, its inverse
};

// A row is what a softmax is taken of: a query head, or, where the group's scores are reduced
// first, a query.
struct MassPlan {
  int group = 1;           // query heads of a KV head
  int rows_per_query = 1;  // and KV head
  int num_parts = 0;       // of the keys, one for a warp
  int64_t queries_per_round = 0;

  int64_t rounds = 0;
  int64_t queries_per_slice = 0;  // of a round, in the first pass
  unsigned slices = 0;

  // On the device. Queries that see a key are listed by phase, in their order.
  int32_t* listed_queries = nullptr;  // [queries]
  int32_t* listed_limits = nullptr;   // [queries], those of the listed queries
  int32_t* phase_starts = nullptr;    // [num_phases + 1] into the lists
  RowSum* part_sums = nullptr;        // [KV heads, queries_per_round, rows_per_query, num_parts]
  RowSum* row_sums = nullptr;         // [KV heads, queries_per_round, rows_per_query]

  // Query: counted from the first of the round.
  __device__ int64_t row(int64_t kv_head, int64_t query, int head) const {
    return (kv_head * queries_per_round + query) * rows_per_query +
           (rows_per_query == 1 ? 0 : head);
  }
};

MassPlan plan_of(const MassProblem& problem) {
  MassPlan plan;
  const int64_t keys = keys_per_warp(problem.key.head_size);
  const int64_t tiles = ceil_div(problem.tokens, kKeyTileWarps * keys);
  const int64_t heads = problem.key.num_heads;
  plan.group = static_cast<int>(problem.query.heads / heads);
  plan.rows_per_query = problem.reduction == GroupReduction::max_logit ? 1 : plan.group;
  plan.num_parts = static_cast<int>(tiles * kKeyTileWarps);
  const int64_t bytes_per_query =
      heads * plan.rows_per_query * plan.num_parts * int64_t{sizeof(RowSum)};
  const int64_t queries = ceil_div(problem.query.tokens, kVectorsPerTile) * kVectorsPerTile;
  const int64_t with_room =
      kMostPartBytes / std::max<int64_t>(bytes_per_query, 1) / kVectorsPerTile * kVectorsPerTile;
  plan.queries_per_round =
      std::min(queries, std::max<int64_t>(with_room, int64_t{kVectorsPerTile}));
  if (queries == 0 || tiles == 0) return plan;
  plan.rounds = ceil_div(queries, plan.queries_per_round);
  const int64_t query_tiles = plan.queries_per_round / kVectorsPerTile;
  const int64_t slices = std::clamp<int64_t>(kBlocksThatFillADevice / (tiles * heads), 1,
                                             std::min<int64_t>(query_tiles, 64));
  plan.queries_per_slice = ceil_div(query_tiles, slices) * kVectorsPerTile;
  plan.slices = static_cast<unsigned>(ceil_div(plan.queries_per_round, plan.queries_per_slice));
  return plan;
}

void place(const MassProblem& problem, Allotment& memory, MassPlan& plan) {
  const int64_t rows =
      problem.key.num_heads * plan.queries_per_round * int64_t{plan.rows_per_query};
  plan.phase_starts = memory.take<int32_t>(problem.num_phases + 1);
  plan.listed_queries = memory.take<int32_t>(problem.query.tokens);
  plan.listed_limits = memory.take<int32_t>(problem.query.tokens);
  plan.part_sums = memory.take<RowSum>(rows * plan.num_parts);
  plan.row_sums = memory.take<RowSum>(rows);
}

// One block. Thread t lists the t-th stretch of the queries.
__global__ void __launch_bounds__(kListThreads)
    list_queries_kernel(MassProblem problem, MassPlan plan) {
  auto* counts = reinterpret_cast<int*>(dynamic_shared_memory());  // [kListThreads]
  const int thread = static_cast<int>(threadIdx.x);
  const auto queries = static_cast<int>(problem.query.tokens);
  const int per_thread = (queries + kListThreads - 1) / kListThreads;
  const int begin = thread * per_thread < queries ? thread * per_thread : queries;
  const int end = begin + per_thread < queries ? begin + per_thread : queries;
  const auto limit_of = [&](int query) {
    const int64_t limit =
        problem.query_limits == nullptr ? problem.tokens : problem.query_limits[query];
    return static_cast<int>(limit < problem.tokens ? limit : problem.tokens);
  };
  const auto is_of = [&](int64_t phase, int query) {
    return limit_of(query) > 0 &&
           (problem.query_phases == nullptr || problem.query_phases[query] == phase);
  };
  int listed = 0;  // of the phases before
  for (int64_t phase = 0; phase < problem.num_phases; ++phase) {
    int count = 0;
    for (int query = begin; query < end; ++query) count += is_of(phase, query) ? 1 : 0;
    counts[thread] = count;
    if (thread == 0) plan.phase_starts[phase] = listed;
    __syncthreads();
    int at = listed;
    for (int i = 0; i < kListThreads; ++i) {
      if (i < thread) at += counts[i];
      listed += counts[i];
    }
    for (int query = begin; query < end; ++query) {
      if (!is_of(phase, query)) continue;
      plan.listed_queries[at] = query;
      plan.listed_limits[at] = limit_of(query);
      ++at;
    }
    __syncthreads();  // the counts are read
  }
  if (thread == 0) plan.phase_starts[problem.num_phases] = listed;
}

// Listed queries [begin, begin + count), of the query heads of one KV head: vector 16 i + r with
// i = tile * group + head is that head of query 16 tile + r.
struct GroupRows {
  const RowsView* query;
  const int32_t* listed;
  int begin;
  int count;
  int group;
  int64_t first_head;
  bool is_aligned;

  __device__ const void* data() const { return query->data; }
  __device__ DataType dtype() const { return query->dtype; }
  __device__ int query_of(int vector) const {
    return vector / (kVectorsPerTile * group) * kVectorsPerTile + vector % kVectorsPerTile;
  }
  __device__ bool has(int vector) const { return query_of(vector) < count; }
  __device__ int64_t offset(int vector) const {
    return offset_of_row(*query, listed[begin + query_of(vector)],
                         first_head + vector / kVectorsPerTile % group);
  }
  __device__ int64_t offset_in_row(int dim) const { return dim; }

  __device__ int tiles() const { return (count + kVectorsPerTile - 1) / kVectorsPerTile * group; }
};

// The scores of a warp's keys, a query tile and query head after the other. Every lane has two
// queries, whose limits it knows.
struct WarpScores {
  const MassPlan* plan;
  const GroupRows* rows;
  int first_key;  // of the warp
  float scale;
  int limits[2] = {};
  int most_keys = 0;  // the largest limit of the tile's queries

  // Looks up the limits of the tile's queries, when it is the first of them.
  __device__ bool wants(int index) {
    if (index % rows->group == 0) {
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = index / rows->group * kVectorsPerTile + lane / 4 + 8 * r;
        limits[r] = query < rows->count ? plan->listed_limits[rows->begin + query] : 0;
      }
      most_keys = column_max(limits[0] > limits[1] ? limits[0] : limits[1]);
    }
    return first_key < most_keys;
  }

  __device__ bool sees(int n, int i) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    return first_key + 8 * n + lane % 4 * 2 + i % 2 < limits[i / 2];
  }

  // In units of log 2. A product that is not finite becomes one that no maximum loses.
  template <int kTiles>
  __device__ void scale_products(float (&products)[kTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = products[n][i] * scale;
        products[n][i] = sees(n, i) ? fmaf(0.0F, score, score) : -INFINITY;
      }
    }
  }
};

// running = the larger one of it and of `values`, or those alone; and back to `values`.
template <int kTiles>
__device__ inline void reduce_heads(bool is_first, float (&running)[kTiles][4],
                                    float (&values)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      running[n][i] = is_first ? values[n][i] : larger_of(running[n][i], values[n][i]);
      values[n][i] = running[n][i];
    }
  }
}

__device__ inline float log2_scale(const MassProblem& problem) { return problem.scale * kLog2E; }

struct Alignment {
  bool query;
  bool key;
};

// First pass. Block (key tile, KV head, slice of the queries of a round).
template <typename Tile>
__global__ void __launch_bounds__(kKeyTileThreads)
    sum_weights_kernel(MassProblem problem, MassPlan plan, int64_t round, Alignment alignment) {
  auto& memory = *reinterpret_cast<typename Tile::Memory*>(dynamic_shared_memory());
  const int64_t round_begin = round * plan.queries_per_round;
  const int64_t begin = round_begin + blockIdx.z * plan.queries_per_slice;
  const int64_t listed = plan.phase_starts[problem.num_phases];
  int64_t left =
      (listed < round_begin + plan.queries_per_round ? listed
                                                     : round_begin + plan.queries_per_round) -
      begin;
  left = left < plan.queries_per_slice ? left : plan.queries_per_slice;
  if (left <= 0) return;  // the whole block
  const GroupRows rows = {
      &problem.query,         plan.listed_queries, static_cast<int>(begin),
      static_cast<int>(left), plan.group,          int64_t{blockIdx.y} * plan.group,
      alignment.query};
  const int head_size = static_cast<int>(problem.key.head_size);
  const int first_key = static_cast<int>(blockIdx.x) * Tile::kKeys;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int part = static_cast<int>(blockIdx.x) * kKeyTileWarps + warp;
  Tile tile;
  tile.load(key_rows_of(problem, alignment.key), first_key, head_size, memory);

  constexpr int kTiles = Tile::kKeysPerWarp / 8;
  WarpScores scores = {&plan, &rows, first_key + warp * Tile::kKeysPerWarp, log2_scale(problem)};
  float running[kTiles][4];
  const auto wants = [&](int index) { return scores.wants(index); };
  const auto use = [&](int index, float(&products)[kTiles][4]) {
    const int head = index % plan.group;
    scores.scale_products(products);
    if (plan.rows_per_query < plan.group) {
      reduce_heads(head == 0, running, products);
      if (head + 1 < plan.group) return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float maximum = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        maximum = fmaxf(maximum, fmaxf(products[n][2 * r], products[n][2 * r + 1]));
      }
      maximum = quad_max(maximum);
      // Without a key, anything finite: no difference of infinities.
      const float base = maximum == -INFINITY ? 0.0F : maximum;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        sum += exp2f(products[n][2 * r] - base) + exp2f(products[n][2 * r + 1] - base);
      }
      sum = quad_sum(sum);
      if (lane % 4 != 0 || scores.first_key >= scores.limits[r]) continue;
      const int64_t query =
          begin - round_begin + index / plan.group * kVectorsPerTile + lane / 4 + 8 * r;
      plan.part_sums[plan.row(blockIdx.y, query, head) * plan.num_parts + part] = {base, sum};
    }
  };
  stream_vectors(tile, memory, rows, rows.tiles(), head_size, wants, use);
}

// A warp takes a row of the round: adds up its parts, in order.
__global__ void __launch_bounds__(kMergeThreads)
    merge_sums_kernel(MassProblem problem, MassPlan plan, int64_t round, int keys_per_part) {
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kMergeThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (row >= problem.key.num_heads * plan.queries_per_round * plan.rows_per_query) return;
  const int64_t query =
      round * plan.queries_per_round + row / plan.rows_per_query % plan.queries_per_round;
  if (query >= plan.phase_starts[problem.num_phases]) return;
  const int parts = (plan.listed_limits[query] + keys_per_part - 1) / keys_per_part;
  const RowSum* sums = plan.part_sums + row * plan.num_parts;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float maximum = -INFINITY;
  for (int part = lane; part < parts; part += kWarpSize) {
    maximum = fmaxf(maximum, sums[part].maximum);
  }
  maximum = warp_max(maximum);
  float sum = 0.0F;
  for (int part = lane; part < parts; part += kWarpSize) {
    sum = fmaf(sums[part].sum, exp2f(sums[part].maximum - maximum), sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) plan.row_sums[row] = {maximum, 1.0F / sum};
}

// Second pass. Block (key tile, KV head, phase).
template <typename Tile>
__global__ void __launch_bounds__(kKeyTileThreads)
    add_weights_kernel(MassProblem problem, MassOutput output, MassPlan plan, int64_t round,
                       Alignment alignment) {
  auto& memory = *reinterpret_cast<typename Tile::Memory*>(dynamic_shared_memory());
  const int64_t round_begin = round * plan.queries_per_round;
  const int64_t round_end = round_begin + plan.queries_per_round;
  int64_t begin = plan.phase_starts[blockIdx.z];
  begin = begin > round_begin ? begin : round_begin;
  int64_t end = plan.phase_starts[blockIdx.z + 1];
  end = end < round_end ? end : round_end;
  const bool adds = output.adds || round > 0;
  const int first_key = static_cast<int>(blockIdx.x) * Tile::kKeys;
  const bool has_work = begin < end && first_key < problem.tokens;
  if (adds && !has_work) return;  // the whole block
  const GroupRows rows = {&problem.query,
                          plan.listed_queries,
                          static_cast<int>(begin),
                          has_work ? static_cast<int>(end - begin) : 0,
                          plan.group,
                          int64_t{blockIdx.y} * plan.group,
                          alignment.query};
  const int head_size = static_cast<int>(problem.key.head_size);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  Tile tile;
  if (has_work) {
    tile.load(key_rows_of(problem, alignment.key), first_key, head_size, memory);
  }

  constexpr int kTiles = Tile::kKeysPerWarp / 8;
  WarpScores scores = {&plan, &rows, first_key + warp * Tile::kKeysPerWarp, log2_scale(problem)};
  float running[kTiles][4];
  float mass[kTiles][2] = {};  // of the lane's columns, from its rows
  const auto wants = [&](int index) { return scores.wants(index); };
  const auto use = [&](int index, float(&values)[kTiles][4]) {
    const int head = index % plan.group;
    scores.scale_products(values);
    if (problem.reduction == GroupReduction::max_logit) {
      reduce_heads(head == 0, running, values);
      if (head + 1 < plan.group) return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (scores.limits[r] == 0) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) values[n][2 * r] = values[n][2 * r + 1] = 0.0F;
        continue;
      }
      const int64_t query =
          begin - round_begin + index / plan.group * kVectorsPerTile + lane / 4 + 8 * r;
      const RowSum row = plan.row_sums[plan.row(blockIdx.y, query, head)];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          values[n][i] = scores.sees(n, i) ? exp2f(values[n][i] - row.maximum) * row.sum : 0.0F;
        }
      }
    }
    if (problem.reduction == GroupReduction::max) {
      reduce_heads(head == 0, running, values);
      if (head + 1 < plan.group) return;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) mass[n][i] += values[n][i] + values[n][2 + i];
    }
  };
  stream_vectors(tile, memory, rows, rows.tiles(), head_size, wants, use);

  const auto listed = static_cast<float>(plan.phase_starts[problem.num_phases]);
  float share = output.is_a_mean && listed > 0.0F ? 1.0F / listed : 1.0F;
  if (problem.reduction == GroupReduction::mean) share /= static_cast<float>(plan.group);
  float* out = output.data + blockIdx.z * output.phase_stride + blockIdx.y * output.head_stride;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = share * column_sum(mass[n][i]);
      const int64_t key = int64_t{scores.first_key} + 8 * n + lane % 4 * 2 + i;
      if (lane < 4 && key < output.tokens) out[key] = adds ? out[key] + sum : sum;
    }
  }
}

}  // namespace

void take_attention_mass_memory(const MassProblem& problem, Allotment& memory) {
  MassPlan plan = plan_of(problem);
  place(problem, memory, plan);
}

void check_mass_problem(const MassProblem& problem) {
  check_device_key_range(problem.key, problem.block_table, problem.first_token, problem.tokens);
  check_key_tile(problem.key);
  check_query(problem.query, problem.key);
  check_scale(problem.scale);
  if (problem.query.tokens > kMaxInBlock - kListThreads) {
    refuse("query.tokens", problem.query.tokens,
           "at most " + std::to_string(kMaxInBlock - kListThreads));
  }
}

void attention_mass(const MassProblem& problem, const MassOutput& output, Allotment memory,
                    const char* needed_by, Stream stream) {
  MassPlan plan = plan_of(problem);
  place(problem, memory, plan);
  memory.check(needed_by);
  const Alignment alignment = {has_aligned_rows(problem.query), has_aligned_rows(problem.key)};
  const auto heads = static_cast<unsigned>(problem.key.num_heads);
  launch(list_queries_kernel, dim3(1), kListThreads, kListThreads * sizeof(int), stream, problem,
         plan);
  with_key_tile(problem.key, problem.query.dtype, [&](auto tag) {
    using Tile = typename decltype(tag)::Type;
    constexpr size_t kSharedBytes = sizeof(typename Tile::Memory);
    for (int64_t round = 0; round < plan.rounds; ++round) {
      launch(sum_weights_kernel<Tile>,
             dim3(blocks_for(problem.tokens, Tile::kKeys), heads, plan.slices), kKeyTileThreads,
             kSharedBytes, stream, problem, plan, round, alignment);
      launch(merge_sums_kernel,
             dim3(blocks_for(heads * plan.queries_per_round * plan.rows_per_query,
                             kMergeThreads / kWarpSize)),
             kMergeThreads, 0, stream, problem, plan, round, Tile::kKeysPerWarp);
      launch(add_weights_kernel<Tile>,
             dim3(blocks_for(output.tokens, Tile::kKeys), heads,
                  static_cast<unsigned>(problem.num_phases)),
             kKeyTileThreads, kSharedBytes, stream, problem, output, plan, round, alignment);
    }
    // Zeros, where there is nothing to add up.
    if (plan.rounds == 0 && !output.adds) {
      launch(add_weights_kernel<Tile>,
             dim3(blocks_for(output.tokens, Tile::kKeys), heads,
                  static_cast<unsigned>(problem.num_phases)),
             kKeyTileThreads, kSharedBytes, stream, problem, output, plan, int64_t{0}, alignment);
    }
  });
}

}  // namespace phasekv::cuda
