// Bound by memory: the scores are read five times, of which four from the L2 cache.
#include <cstdint>

#include "launch.cuh"
#include "phasekv/cuda.h"
#include "phasekv/ops/select_top.h"
#include "validate.h"
#include "workspace.cuh"

namespace phasekv::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kWarpSize;
constexpr unsigned kDigitBits = 8;
constexpr unsigned kDigits = 1U << kDigitBits;
constexpr int64_t kNone = 0x7FFFFFFFFFFFFFFF;

// What is known of a segment once its scores have been counted.
struct Selection {
  int64_t count;       // of tokens to take, pinned ones among them
  int64_t ties;        // of those at the threshold, the first so many are taken
  int64_t first_nan;   // index of the first score that is not a number, or kNone
  uint32_t threshold;  // all above it are taken
};

// Higher scores have higher keys, and the two zeros have one. All bits may be set: NaN.
__device__ inline uint32_t key_of(float score) {
  uint32_t bits;
  memcpy(&bits, &score, sizeof bits);
  if (score == 0.0F) bits = 0;
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

__device__ inline bool is_pinned(const SelectTopParams& params, int64_t i) {
  return params.pinned != nullptr && params.pinned[i] != 0;
}

struct CountMemory {
  int histogram[kDigits];
  int pinned[kThreads];
  int64_t first_nan[kThreads];
  int64_t wanted;  // of those that are not pinned
  uint32_t prefix;
};

// Block: a segment. Finds the key of the last token to take, eight bits at a time from the top.
__global__ void __launch_bounds__(kThreads)
    count_kernel(SelectTopParams params, Selection* selections) {
  auto& memory = *reinterpret_cast<CountMemory*>(dynamic_shared_memory());
  const unsigned thread = threadIdx.x;
  const int64_t begin = params.segment_starts[blockIdx.x];
  const int64_t end = params.segment_starts[blockIdx.x + 1];
  int pinned = 0;
  int64_t first_nan = kNone;
  for (int64_t i = begin + thread; i < end; i += kThreads) {
    pinned += is_pinned(params, i) ? 1 : 0;
    if (params.scores[i] != params.scores[i] && i < first_nan) first_nan = i;
  }
  memory.pinned[thread] = pinned;
  memory.first_nan[thread] = first_nan;
  __syncthreads();
  Selection& selection = selections[blockIdx.x];
  if (thread == 0) {
    int64_t all_pinned = 0;
    for (unsigned i = 0; i < kThreads; ++i) {
      all_pinned += memory.pinned[i];
      if (memory.first_nan[i] < first_nan) first_nan = memory.first_nan[i];
    }
    const int64_t others = end - begin - all_pinned;
    int64_t wanted = params.counts[blockIdx.x] - all_pinned;
    wanted = wanted < 0 ? 0 : wanted;
    wanted = wanted > others ? others : wanted;
    memory.wanted = wanted;
    memory.prefix = 0;
    selection.count = all_pinned + wanted;
    selection.first_nan = first_nan;
  }
  __syncthreads();
  if (memory.wanted == 0) {  // the whole block
    if (thread == 0) {
      selection.threshold = 0xFFFFFFFFU;
      selection.ties = 0;
    }
    return;
  }
  for (int shift = 32 - static_cast<int>(kDigitBits); shift >= 0; shift -= kDigitBits) {
    memory.histogram[thread] = 0;
    __syncthreads();
    const uint32_t prefix = memory.prefix;
    // Of the bits above this digit; a shift by 32 would not be one.
    const uint32_t above = static_cast<uint32_t>(~uint64_t{0} << (shift + kDigitBits));
    for (int64_t i = begin + thread; i < end; i += kThreads) {
      const uint32_t key = key_of(params.scores[i]);
      if (is_pinned(params, i) || (key & above) != prefix) continue;
      atomicAdd(&memory.histogram[key >> shift & (kDigits - 1)], 1);
    }
    __syncthreads();
    if (thread == 0) {
      int64_t wanted = memory.wanted;
      unsigned digit = kDigits - 1;
      while (memory.histogram[digit] < wanted) wanted -= memory.histogram[digit--];
      memory.wanted = wanted;
      memory.prefix = prefix | digit << shift;
    }
    __syncthreads();
  }
  if (thread == 0) {
    selection.threshold = memory.prefix;
    selection.ties = memory.wanted;
  }
}

// One thread: there are few segments.
__global__ void sum_counts_kernel(const Selection* selections, int64_t num_segments,
                                  SelectTopOutput output) {
  int64_t sum = 0;
  int64_t first_nan = kNone;
  for (int64_t segment = 0; segment < num_segments; ++segment) {
    output.chosen_starts[segment] = sum;
    sum += selections[segment].count;
    const int64_t nan = selections[segment].first_nan;
    if (nan < first_nan) first_nan = nan;
  }
  output.chosen_starts[num_segments] = sum;
  *output.first_nan = first_nan == kNone ? -1 : first_nan;
}

// How many of the threads before this one have the flag, and how many of the block.
struct Rank {
  int before;
  int all;
};

// `counts` [kWarps] is shared memory that nobody uses when the block comes here.
__device__ inline Rank rank_in_block(bool flag, int* counts) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned warp = threadIdx.x / kWarpSize;
  const unsigned ballot = __ballot_sync(kAllLanes, flag ? 1 : 0);
  if (lane == 0) counts[warp] = __popc(ballot);
  __syncthreads();
  Rank rank = {__popc(ballot & ((1U << lane) - 1U)), 0};
  for (unsigned i = 0; i < kWarps; ++i) {
    if (i < warp) rank.before += counts[i];
    rank.all += counts[i];
  }
  return rank;
}

// Block: a segment, in order.
__global__ void __launch_bounds__(kThreads)
    write_kernel(SelectTopParams params, const Selection* selections, SelectTopOutput output) {
  auto* counts = reinterpret_cast<int*>(dynamic_shared_memory());  // of ties, then of chosen ones
  const int64_t begin = params.segment_starts[blockIdx.x];
  const int64_t end = params.segment_starts[blockIdx.x + 1];
  const Selection selection = selections[blockIdx.x];
  int64_t* chosen = output.chosen + output.chosen_starts[blockIdx.x];
  int64_t ties = 0;
  for (int64_t base = begin; base < end; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    const bool pinned = i < end && is_pinned(params, i);
    const uint32_t key = i < end ? key_of(params.scores[i]) : 0;
    const bool is_tie = i < end && !pinned && key == selection.threshold;
    const Rank tie = rank_in_block(is_tie, counts);
    const bool is_chosen = pinned || (i < end && key > selection.threshold) ||
                           (is_tie && ties + tie.before < selection.ties);
    const Rank rank = rank_in_block(is_chosen, counts + kWarps);
    if (is_chosen) chosen[rank.before] = i;
    chosen += rank.all;
    ties += tie.all;
  }
}

}  // namespace

int64_t select_top_workspace_bytes(const SelectTopParams& params) {
  Allotment memory;
  memory.take<Selection>(params.num_segments);
  return memory.bytes();
}

void select_top(const SelectTopParams& params, const SelectTopOutput& output,
                const Workspace& workspace, Stream stream) {
  check_not_null("segment_starts", params.segment_starts, params.num_segments + 1);
  check_not_null("counts", params.counts, params.num_segments);
  check_not_null("chosen_starts", output.chosen_starts, 1);
  check_not_null("first_nan", output.first_nan, 1);
  Allotment memory(workspace);
  auto* selections = memory.take<Selection>(params.num_segments);
  memory.check("select_top_workspace_bytes()");
  const unsigned segments = blocks_for(params.num_segments, 1);
  if (segments > 0) {
    launch(count_kernel, dim3(segments), kThreads, sizeof(CountMemory), stream, params, selections);
  }
  launch(sum_counts_kernel, dim3(1), 1, 0, stream, selections, params.num_segments, output);
  if (segments > 0) {
    launch(write_kernel, dim3(segments), kThreads, 2 * kWarps * sizeof(int), stream, params,
           selections, output);
  }
}

}  // namespace phasekv::cuda
