// The copy-like ops of reuse on a chunk's rows and a paged cache.
#pragma once

#include <memory>
#include <vector>

#include "comparison.h"

namespace phasekv::benchmarks {

std::unique_ptr<Workload> make_copy_workload(const Shape& shape);

// Prompts of SmolLM2-135M and of Qwen3-8B.
std::vector<Shape> copy_shapes();

}  // namespace phasekv::benchmarks
