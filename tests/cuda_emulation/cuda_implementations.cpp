// implementations() of the emulated CUDA kernels: one per order of threads. To the emulation all
// memory is device memory, so the ops of phasekv/ops.h, which check every list, call the kernels
// directly.
#include <cstddef>
#include <utility>
#include <vector>

#include "implementations.h"
#include "phasekv/cuda.h"
#include "scheduler.h"
#include "thread_orders.h"

namespace phasekv {

namespace {

constexpr cuda::Stream kStream = nullptr;

template <size_t kOrder>
struct Kernels {
  static void use_order() { emulation::set_thread_order(emulation::kThreadOrders[kOrder].order); }

  static void gather_blocks(const GatherBlocksParams& params) {
    use_order();
    cuda::gather_blocks(params, kStream);
  }
  static void scatter_blocks(const ScatterBlocksParams& params) {
    use_order();
    cuda::scatter_blocks(params, kStream);
  }
  static void rotate_keys(const RotateKeysParams& params) {
    use_order();
    cuda::rotate_keys(params, kStream);
  }
  static void divergence(const DivergenceParams& params) {
    use_order();
    cuda::divergence(params, kStream);
  }
  static void mean_residual(const MeanResidualParams& params) {
    use_order();
    cuda::mean_residual(params, kStream);
  }
  static void apply_shift(const ApplyShiftParams& params) {
    use_order();
    cuda::apply_shift(params, params.segment_starts[params.num_segments], kStream);
  }

  static constexpr cpu::KernelTable make_table() {
    cpu::KernelTable table{};
    table.gather_blocks = gather_blocks;
    table.scatter_blocks = scatter_blocks;
    table.rotate_keys = rotate_keys;
    table.divergence = divergence;
    table.mean_residual = mean_residual;
    table.apply_shift = apply_shift;
    return table;
  }
  static constexpr cpu::KernelTable kTable = make_table();
};

template <size_t... kOrder>
std::vector<Implementation> all_orders(std::index_sequence<kOrder...>) {
  return {{emulation::kThreadOrders[kOrder].name, "emulated", &Kernels<kOrder>::kTable}...};
}

}  // namespace

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> all =
      all_orders(std::make_index_sequence<emulation::kThreadOrders.size()>());
  return all;
}

}  // namespace phasekv
