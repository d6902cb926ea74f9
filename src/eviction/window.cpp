#include "phasekv/eviction/window.h"

#include <algorithm>
#include <string>

#include "validate.h"

namespace phasekv::eviction {

int64_t Window::start(int64_t computed) const {
  const bool held = held_from <= computed && computed < held_until;
  const int64_t n = held ? held_from : computed;
  return std::max<int64_t>(0, n / stride * stride - budget);
}

void check_window(const Window& window, int64_t block_size, int64_t protected_tokens) {
  const std::string multiple =
      "a positive multiple of the block size " + std::to_string(block_size);
  if (window.budget <= 0 || window.budget % block_size != 0) {
    refuse("budget", window.budget, multiple);
  }
  if (window.stride <= 0 || window.stride % block_size != 0) {
    refuse("stride", window.stride, multiple);
  }
  if (protected_tokens > window.budget) {
    refuse("budget", window.budget,
           "at least the " + std::to_string(protected_tokens) +
               " tokens that the policy always keeps (sinks and recent ones)");
  }
}

}  // namespace phasekv::eviction
