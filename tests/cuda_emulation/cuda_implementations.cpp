// implementations() of the emulated CUDA kernels: one per order of threads.
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "implementations.h"
#include "kernel_calls.h"
#include "scheduler.h"
#include "streams.h"
#include "thread_orders.h"

namespace phasekv {

namespace {

template <size_t kOrder>
struct InOrder {
  InOrder() {
    emulation::set_thread_order(emulation::kThreadOrders[kOrder].order);
    emulation::allow_host_memory(emulation::HostMemory::heap);
  }
  ~InOrder() { emulation::allow_host_memory(emulation::HostMemory::any); }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;
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

// Work of streams is done as late as can be, and memory is the host's or the device's, never both.
class DeviceOfItsOwn {
 public:
  explicit DeviceOfItsOwn(emulation::ThreadOrder order) {
    emulation::set_thread_order(order);
    emulation::set_pace(emulation::Pace::when_waited_for);
    emulation::allow_host_memory(emulation::HostMemory::none);
  }
  ~DeviceOfItsOwn() {
    emulation::set_pace(emulation::Pace::at_once);
    emulation::allow_host_memory(emulation::HostMemory::any);
  }
  DeviceOfItsOwn(const DeviceOfItsOwn&) = delete;
  DeviceOfItsOwn& operator=(const DeviceOfItsOwn&) = delete;
};

template <size_t kOrder>
std::shared_ptr<void> set_up_device() {
  return std::make_shared<DeviceOfItsOwn>(emulation::kThreadOrders[kOrder].order);
}

template <size_t... kOrder>
std::vector<DeviceSetup> all_device_setups(std::index_sequence<kOrder...>) {
  return {&set_up_device<kOrder>...};
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

const std::vector<DeviceSetup>& device_setups() {
  static const std::vector<DeviceSetup> all = all_device_setups(kOrders);
  return all;
}

}  // namespace phasekv
