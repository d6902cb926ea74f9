// Window-shaped eviction: which part of a request's tokens is held, as a function of how many were
// computed. It has no history, so that a scheduler and its workers agree on it without a message,
// whatever the chunks of a prefill, and after every preemption.
#pragma once

#include <cstdint>

namespace phasekv::eviction {

struct Window {
  int64_t budget = 0;      // B: tokens held after an event at a multiple of the stride
  int64_t stride = 0;      // Delta: an event comes at every multiple of it, once B is exceeded
  int64_t held_from = 0;   // a prompt that is compressed only at its end: its computed tokens
  int64_t held_until = 0;  // [held_from, held_until) cause no event; an empty range holds nothing

  // First logical position that is held once `computed` tokens were computed:
  // max(0, floor(computed / stride) * stride - budget), non-decreasing in `computed`. The tokens
  // held are [start(n), n): after an event they are the survivors, not the newest.
  int64_t start(int64_t computed) const;
};

// Throws invalid_argument unless budget and stride are positive multiples of block_size and the
// protected tokens fit: protected_tokens <= budget.
void check_window(const Window& window, int64_t block_size, int64_t protected_tokens);

}  // namespace phasekv::eviction
