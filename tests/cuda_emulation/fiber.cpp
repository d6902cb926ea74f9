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
#if !defined(__x86_64__) || defined(PHASEKV_THREAD_SANITIZER)
#define PHASEKV_UCONTEXT
#include <ucontext.h>
#endif

namespace phasekv::emulation {

namespace {

constexpr size_t kStackBytes = size_t{256} << 10;

}  // namespace

#if defined(PHASEKV_UCONTEXT)

using Context = ucontext_t;

static void switch_context(Context* from, Context* to) { swapcontext(from, to); }

#else

// A suspended stack is its stack pointer; the registers that a callee must keep lie on top. A stack
// that has not run yet returns into phasekv_enter_fiber, with what to call and its argument in two
// of those registers.
using Context = void*;

extern "C" void phasekv_switch_context(Context* from, Context to);
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

static void switch_context(Context* from, Context* to) { phasekv_switch_context(from, *to); }

#endif

struct Fiber::State {
  char* memory = nullptr;  // a page that cannot be touched, then the stack
  char* stack = nullptr;
  Context context{};
  Context scheduler{};
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_bottom = nullptr;
  size_t scheduler_size = 0;
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  void* thread = nullptr;
  void* scheduler_thread = nullptr;
#endif
};

Fiber::Fiber() : state_(new State) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page, PROT_NONE);
  state_->memory = static_cast<char*>(memory);
  state_->stack = state_->memory + page;
#if defined(PHASEKV_THREAD_SANITIZER)
  state_->thread = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(state_->stack, kStackBytes);
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  __tsan_destroy_fiber(state_->thread);
#endif
  munmap(state_->memory, kStackBytes + static_cast<size_t>(state_->stack - state_->memory));
}

void Fiber::begin(void (*body)(void*), void* argument) {
  state_->body = body;
  state_->argument = argument;
#if defined(__SANITIZE_ADDRESS__)
  state_->fake_stack = nullptr;
  ASAN_UNPOISON_MEMORY_REGION(state_->stack, kStackBytes);
#endif
#if defined(PHASEKV_UCONTEXT)
  getcontext(&state_->context);
  state_->context.uc_stack.ss_sp = state_->stack;
  state_->context.uc_stack.ss_size = kStackBytes;
  state_->context.uc_link = nullptr;
  // makecontext hands over ints only.
  const auto address = reinterpret_cast<uintptr_t>(this);
  using Entry = void (*)();
  const auto start = [](unsigned low, unsigned high) {
    entry(reinterpret_cast<Fiber*>(uintptr_t{low} | (uintptr_t{high} << 32)));
  };
  void (*with_address)(unsigned, unsigned) = start;
  makecontext(&state_->context, reinterpret_cast<Entry>(with_address), 2,
              static_cast<unsigned>(address), static_cast<unsigned>(address >> 32));
#else
  auto* top = reinterpret_cast<void**>(state_->stack + kStackBytes);
  *--top = reinterpret_cast<void*>(&phasekv_enter_fiber);
  *--top = reinterpret_cast<void*>(&Fiber::entry);  // rbp
  *--top = this;                                    // rbx
  for (int i = 0; i < 4; ++i) *--top = nullptr;
  state_->context = top;
#endif
}

void Fiber::resume() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&state_->scheduler_fake_stack, state_->stack, kStackBytes);
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  state_->scheduler_thread = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(state_->thread, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(&state_->scheduler, &state_->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(state_->scheduler_fake_stack, nullptr, nullptr);
#endif
}

void Fiber::suspend() { leave(/*for_good=*/false); }

void Fiber::leave([[maybe_unused]] bool for_good) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &state_->fake_stack, state_->scheduler_bottom,
                                 state_->scheduler_size);
#endif
#if defined(PHASEKV_THREAD_SANITIZER)
  __tsan_switch_to_fiber(state_->scheduler_thread, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(&state_->context, &state_->scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(state_->fake_stack, &state_->scheduler_bottom,
                                  &state_->scheduler_size);
#endif
}

void Fiber::entry(Fiber* fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &fiber->state_->scheduler_bottom,
                                  &fiber->state_->scheduler_size);
#endif
  fiber->state_->body(fiber->state_->argument);
  fiber->leave(/*for_good=*/true);
  __builtin_unreachable();
}

void Fiber::order_after_scheduler() {
#if defined(PHASEKV_THREAD_SANITIZER)
  void* scheduler = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(state_->thread, 0);
  __tsan_switch_to_fiber(scheduler, __tsan_switch_to_fiber_no_sync);
#endif
}

void Fiber::order_scheduler_after() {
#if defined(PHASEKV_THREAD_SANITIZER)
  void* scheduler = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(state_->thread, __tsan_switch_to_fiber_no_sync);
  __tsan_switch_to_fiber(scheduler, 0);
#endif
}

}  // namespace phasekv::emulation
