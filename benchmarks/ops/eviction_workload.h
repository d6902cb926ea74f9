// The ops of eviction on a request that holds more keys than its budget.
#pragma once

#include <memory>
#include <vector>

#include "comparison.h"

namespace phasekv::benchmarks {

std::unique_ptr<Workload> make_eviction_workload(const Shape& shape);

// SmolLM2-135M and Qwen3-8B at a budget of 2,048 and a stride of 128, and at the end of a prompt.
std::vector<Shape> eviction_shapes();

}  // namespace phasekv::benchmarks
