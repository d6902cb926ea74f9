// Cooperative stacks: what one emulated CUDA thread runs on. Knows nothing of CUDA, and everything
// that AddressSanitizer and ThreadSanitizer must be told about a change of stacks.
#pragma once

#include <cstddef>
#include <memory>

namespace phasekv::emulation {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From the scheduler's own stack: begins `body(argument)` on this fiber, which must be idle. The
  // body runs when the fiber is resumed. It must not let an exception out.
  void begin(void (*body)(void*), void* argument);
  // From the scheduler's stack: runs the fiber until it suspends itself or its body returns.
  void resume();
  // From the fiber: back to the scheduler.
  void suspend();

  // ThreadSanitizer: everything before on the scheduler's stack happens before what the fiber does
  // next, and the other way round. Changing stacks alone orders nothing, or no race would be found.
  void order_after_scheduler();
  void order_scheduler_after();

 private:
  struct State;
  static void entry(Fiber* fiber);
  void leave(bool for_good);

  std::unique_ptr<State> state_;
};

}  // namespace phasekv::emulation
