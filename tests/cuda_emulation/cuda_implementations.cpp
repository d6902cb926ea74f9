// implementations() of the emulated CUDA kernels: one per order of threads.
#include <cstddef>
#include <utility>
#include <vector>

#include "implementations.h"
#include "kernel_calls.h"
#include "scheduler.h"
#include "thread_orders.h"

namespace phasekv {

namespace {

template <size_t kOrder>
struct InOrder {
  InOrder() { emulation::set_thread_order(emulation::kThreadOrders[kOrder].order); }
};

constexpr auto kOrders = std::make_index_sequence<emulation::kThreadOrders.size()>();

template <size_t... kOrder>
std::vector<Implementation> all_orders(std::index_sequence<kOrder...>) {
  return {{emulation::kThreadOrders[kOrder].name, "emulated",
           &KernelCalls<InOrder<kOrder>>::kTable}...};
}

template <size_t... kOrder>
std::vector<SelectTopCall> all_select_top_calls(std::index_sequence<kOrder...>) {
  return {&KernelCalls<InOrder<kOrder>>::select_top...};
}

}  // namespace

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> all = all_orders(kOrders);
  return all;
}

const std::vector<SelectTopCall>& select_top_calls() {
  static const std::vector<SelectTopCall> all = all_select_top_calls(kOrders);
  return all;
}

}  // namespace phasekv
