// Cooperative stacks: what one emulated CUDA thread runs on. Knows nothing of CUDA, and everything
// that AddressSanitizer and ThreadSanitizer must be told about a change of stacks.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#define PHASEKV_UCONTEXT
#include <ucontext.h>
#endif

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
  // From the fiber: back to the scheduler, or on with another fiber, which has begun. The
  // sanitizers are not told of the latter.
  void suspend();
  void suspend_for(Fiber* other);

  // ThreadSanitizer: everything before on the scheduler's stack happens before what the fiber does
  // next, and the other way round. Changing stacks alone orders nothing, or no race would be found.
  void order_after_scheduler();
  void order_scheduler_after();

 private:
#if defined(PHASEKV_UCONTEXT)
  using Context = ucontext_t;
#else
  using Context = void*;  // the stack pointer
#endif

  static void switch_context(Context* from, Context* to);
  static void entry(Fiber* fiber);
  void leave_for_good();

  Context context_{};
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  char* memory_ = nullptr;  // a page that cannot be touched, then the stack
  char* stack_ = nullptr;
  size_t stack_bytes_ = 0;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack_ = nullptr;
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  void* thread_ = nullptr;
#endif

  // The scheduler's, while fibers run.
  static Context scheduler_;
#if defined(__SANITIZE_ADDRESS__)
  static void* scheduler_fake_stack_;
  static const void* scheduler_bottom_;
  static size_t scheduler_size_;
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  static void* scheduler_thread_;
#endif
};

}  // namespace phasekv::emulation
