// The orders of threads in which every kernel is run. A missing barrier shows in some of them only.
#pragma once

#include <array>

#include "scheduler.h"

namespace phasekv::emulation {

struct NamedOrder {
  const char* name;
  ThreadOrder order;
};

inline constexpr std::array<NamedOrder, 6> kThreadOrders = {{
    {"forward", {Order::forward, 1}},
    {"reverse", {Order::reverse, 1}},
    {"random_1", {Order::random, 1}},
    {"random_2", {Order::random, 2}},
    {"random_3", {Order::random, 3}},
    {"random_4", {Order::random, 4}},
}};

}  // namespace phasekv::emulation
