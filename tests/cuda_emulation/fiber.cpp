#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
// This file itself is never built with -fsanitize=thread (see CMakeLists.txt).
#if defined(PHASEKV_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace phasekv::emulation {

namespace {

constexpr size_t kStackBytes = size_t{256} << 10;

// Stacks begin at pages, and what is at one place in a page shares a few places of the caches:
// those of a block's threads begin at different ones.
constexpr size_t kCacheLine = 64;
constexpr size_t kBeginnings = 64;

size_t next_beginning() {
  static size_t number = 0;
  // An odd step visits all of them, neighbours far apart.
  return 21 * number++ % kBeginnings * kCacheLine;
}

}  // namespace

#if defined(PHASEKV_UCONTEXT)

void Fiber::switch_context(Context* from, Context* to) { swapcontext(from, to); }

#else

// A suspended stack is its stack pointer; the registers that a callee must keep lie on top. A stack
// that has not run yet returns into phasekv_enter_fiber, with what to call and its argument in two
// of those registers.
extern "C" void phasekv_switch_context(void** from, void* to);
extern "C" void phasekv_enter_fiber();
asm(R"(
.text
.globl phasekv_switch_context
.type phasekv_switch_context, @function
phasekv_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size phasekv_switch_context, .-phasekv_switch_context
.globl phasekv_enter_fiber
.type phasekv_enter_fiber, @function
phasekv_enter_fiber:
  movq %rbx, %rdi
  callq *%rbp
  ud2
.size phasekv_enter_fiber, .-phasekv_enter_fiber
)");

void Fiber::switch_context(Context* from, Context* to) { phasekv_switch_context(from, *to); }

#endif

Fiber::Context Fiber::scheduler_;
#if defined(__SANITIZE_ADDRESS__)
void* Fiber::scheduler_fake_stack_ = nullptr;
const void* Fiber::scheduler_bottom_ = nullptr;
size_t Fiber::scheduler_size_ = 0;
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
void* Fiber::scheduler_thread_ = nullptr;
#endif

Fiber::Fiber() : stack_bytes_(kStackBytes - next_beginning()) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page, PROT_NONE);
  memory_ = static_cast<char*>(memory);
  stack_ = memory_ + page;
#if defined(PHASEKV_THREAD_SANITIZER)
  thread_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(stack_, kStackBytes);
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  __tsan_destroy_fiber(thread_);
#endif
  munmap(memory_, kStackBytes + static_cast<size_t>(stack_ - memory_));
}

void Fiber::begin(void (*body)(void*), void* argument) {
  body_ = body;
  argument_ = argument;
#if defined(__SANITIZE_ADDRESS__)
  fake_stack_ = nullptr;
  ASAN_UNPOISON_MEMORY_REGION(stack_, stack_bytes_);
#endif
#if defined(PHASEKV_UCONTEXT)
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = stack_bytes_;
  context_.uc_link = nullptr;
  // makecontext hands over ints only.
  const auto address = reinterpret_cast<uintptr_t>(this);
  using Entry = void (*)();
  const auto start = [](unsigned low, unsigned high) {
    entry(reinterpret_cast<Fiber*>(uintptr_t{low} | (uintptr_t{high} << 32)));
  };
  void (*with_address)(unsigned, unsigned) = start;
  makecontext(&context_, reinterpret_cast<Entry>(with_address), 2, static_cast<unsigned>(address),
              static_cast<unsigned>(address >> 32));
#else
  auto* top = reinterpret_cast<void**>(stack_ + stack_bytes_);
  *--top = reinterpret_cast<void*>(&phasekv_enter_fiber);
  *--top = reinterpret_cast<void*>(&Fiber::entry);  // rbp
  *--top = this;                                    // rbx
  for (int i = 0; i < 4; ++i) *--top = nullptr;
  context_ = top;
#endif
}

void Fiber::resume() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, stack_, stack_bytes_);
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  scheduler_thread_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(thread_, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(&scheduler_, &context_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::suspend() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_stack_, scheduler_bottom_, scheduler_size_);
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  __tsan_switch_to_fiber(scheduler_thread_, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(&context_, &scheduler_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::suspend_for(Fiber* other) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_stack_, other->stack_, other->stack_bytes_);
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  __tsan_switch_to_fiber(other->thread_, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(&context_, &other->context_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::leave_for_good() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(nullptr, scheduler_bottom_, scheduler_size_);
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  __tsan_switch_to_fiber(scheduler_thread_, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(&context_, &scheduler_);
}

void Fiber::entry(Fiber* fiber) {
#if defined(__SANITIZE_ADDRESS__)
  // The first fiber is entered by the scheduler.
  const bool is_first = scheduler_bottom_ == nullptr;
  __sanitizer_finish_switch_fiber(nullptr, is_first ? &scheduler_bottom_ : nullptr,
                                  is_first ? &scheduler_size_ : nullptr);
#endif
  fiber->body_(fiber->argument_);
  fiber->leave_for_good();
  __builtin_unreachable();
}

void Fiber::order_after_scheduler() {
#if defined(PHASEKV_THREAD_SANITIZER)
  void* scheduler = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(thread_, 0);
  __tsan_switch_to_fiber(scheduler, __tsan_switch_to_fiber_no_sync);
#endif
}

void Fiber::order_scheduler_after() {
#if defined(PHASEKV_THREAD_SANITIZER)
  void* scheduler = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(thread_, __tsan_switch_to_fiber_no_sync);
  __tsan_switch_to_fiber(scheduler, 0);
#endif
}

}  // namespace phasekv::emulation
