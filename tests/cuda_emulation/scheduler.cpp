#include "scheduler.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "fiber.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
// This file itself is never built with -fsanitize=thread (see CMakeLists.txt).
#if defined(PHASEKV_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace phasekv::emulation {

Coordinates running;

namespace {

constexpr unsigned kWarpSize = 32;

struct Site {
  const char* file = nullptr;
  unsigned line = 0;
  unsigned column = 0;

  bool operator==(const Site& other) const {
    return file == other.file && line == other.line && column == other.column;
  }
};

Site site_of(const Where& where) { return {where.file_name(), where.line(), where.column()}; }

std::string text_of(const Site& site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

enum class State : uint8_t { fresh, ready, at_barrier, at_warp, finished };

// In one line of the cache: at each switch it is another one's turn.
struct alignas(64) Thread {
  State state = State::fresh;
  WarpOperation operation = WarpOperation::synchronize;
  unsigned index = 0;
  Extent position;
  Fiber* fiber = nullptr;
  Site site;  // of the call it waits in
  unsigned mask = 0;
  void* operand = nullptr;
};
static_assert(sizeof(Thread) == 64);

// cp.async of a thread.
struct Copies {
  std::vector<std::pair<Copy, int>> all;  // with the number of their group
  size_t made = 0;
  int group = 0;  // that is being gathered
};

// ThreadSanitizer orders threads by the addresses they release and acquire. Two generations of a
// barrier need two addresses, or a faster thread's next barrier would order what this one did not.
struct Meetings {
  unsigned generation = 0;
  char addresses[2] = {};

  char* address() { return &addresses[generation % 2]; }
};

// Lanes of a warp, as bits: which wait for others, and which have exited.
struct Lanes {
  unsigned waiting = 0;
  unsigned finished = 0;
};

void release([[maybe_unused]] char* address) {
#if defined(PHASEKV_THREAD_SANITIZER)
  __tsan_release(address);
#endif
}

void acquire([[maybe_unused]] char* address) {
#if defined(PHASEKV_THREAD_SANITIZER)
  __tsan_acquire(address);
#endif
}

#if defined(PHASEKV_THREAD_SANITIZER)
// Threads that share a fiber would be one thread to ThreadSanitizer.
constexpr bool kFibersAreShared = false;
#else
constexpr bool kFibersAreShared = true;
#endif

// memset is seen by the sanitizers as an access of the running thread.
void fill(unsigned char* memory, size_t bytes, unsigned char value) {
  volatile unsigned char* to = memory;
  volatile unsigned char* end = memory + bytes;
  while (to != end && reinterpret_cast<uintptr_t>(to) % sizeof(uint64_t) != 0) *to++ = value;
  for (; static_cast<size_t>(end - to) >= sizeof(uint64_t); to += sizeof(uint64_t)) {
    *reinterpret_cast<volatile uint64_t*>(to) = 0x0101010101010101U * value;
  }
  while (to != end) *to++ = value;
}

// The dynamic shared memory of a block, with a margin on both sides in which a write is noticed.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes)
      : bytes_(bytes),
        memory_(static_cast<unsigned char*>(
            ::operator new(bytes + 2 * kMargin, std::align_val_t(kMargin)))) {}
  ~SharedMemory() {
    unpoison();
    ::operator delete(memory_, std::align_val_t(kMargin));
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  unsigned char* begin() { return memory_ + kMargin; }

  void renew() {
    unpoison();
    fill(memory_, kMargin, kMarginByte);
    fill(begin(), bytes_, 0xFF);
    fill(begin() + bytes_, kMargin, kMarginByte);
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(memory_, kMargin);
    ASAN_POISON_MEMORY_REGION(begin() + bytes_, kMargin);
#endif
  }

  void check() {
    unpoison();
    static const std::vector<unsigned char> margin(kMargin, kMarginByte);
    if (std::memcmp(memory_, margin.data(), kMargin) != 0 ||
        std::memcmp(begin() + bytes_, margin.data(), kMargin) != 0) {
      throw Error("a thread wrote outside the dynamic shared memory of " + std::to_string(bytes_) +
                  " bytes");
    }
  }

 private:
  static constexpr size_t kMargin = 1024;
  static constexpr unsigned char kMarginByte = 0xA5;

  void unpoison() {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(memory_, bytes_ + 2 * kMargin);
#endif
  }

  size_t bytes_;
  unsigned char* memory_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 1) {}

  // In [0, limit).
  unsigned below(unsigned limit) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<unsigned>(((state_ >> 32) * limit) >> 32);
  }

 private:
  uint64_t state_;
};

void shuffle(std::vector<unsigned>* order, Random* random) {
  for (auto i = static_cast<unsigned>(order->size()); i > 1; --i) {
    std::swap((*order)[i - 1], (*order)[random->below(i)]);
  }
}

std::vector<unsigned> in_order(unsigned count, ThreadOrder thread_order, Random* random) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0U);
  if (thread_order.order == Order::reverse) std::reverse(order.begin(), order.end());
  if (thread_order.order == Order::random) shuffle(&order, random);
  return order;
}

void exchange_values(const std::array<void*, kWarpSize>& operands, unsigned mask) {
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1U) == 0) continue;
    auto* operand = static_cast<ExchangeOperand*>(operands[lane]);
    const auto source = static_cast<unsigned>(operand->source);
    if (source >= kWarpSize || (mask >> source & 1U) == 0) {
      throw Error("a shuffle reads lane " + std::to_string(source) + ", which is not in its mask");
    }
    operand->result = static_cast<ExchangeOperand*>(operands[source])->value;
  }
}

void ballot(const std::array<void*, kWarpSize>& operands, unsigned mask) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1U) == 0) continue;
    if (static_cast<BallotOperand*>(operands[lane])->vote) votes |= 1U << lane;
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1U) != 0) static_cast<BallotOperand*>(operands[lane])->votes = votes;
  }
}

// ldmatrix.x4: four matrices of 8 rows; row r of matrix m comes from lane 8 m + r.
void load_matrix(const std::array<void*, kWarpSize>& operands, bool transposed) {
  const auto element = [&](unsigned matrix, unsigned row, unsigned column) -> uint32_t {
    return static_cast<MatrixRowOperand*>(operands[8 * matrix + row])->row[column];
  };
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    auto* operand = static_cast<MatrixRowOperand*>(operands[lane]);
    const unsigned major = lane / 4;
    const unsigned minor = 2 * (lane % 4);
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      const uint32_t low =
          transposed ? element(matrix, minor, major) : element(matrix, major, minor);
      const uint32_t high =
          transposed ? element(matrix, minor + 1, major) : element(matrix, major, minor + 1);
      operand->result[matrix] = low | high << 16;
    }
  }
}

int64_t mmas = 0;

// mma.m16n8k16: D [16 x 8] += A [16 x 16] B [16 x 8]. With g = lane / 4 and t = lane % 4 a lane
// holds
//   A  rows g and g + 8 of columns 2t, 2t + 1 (registers 0, 1) and 2t + 8, 2t + 9 (2, 3)
//   B  rows 2t, 2t + 1 (register 0) and 2t + 8, 2t + 9 (1) of column g
//   D  columns 2t, 2t + 1 of rows g (0, 1) and g + 8 (2, 3)
void mma(const std::array<void*, kWarpSize>& operands) {
  ++mmas;
  float a[16][16];
  float b[16][8];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto* operand = static_cast<MmaOperand*>(operands[lane]);
    const unsigned g = lane / 4;
    const unsigned t = 2 * (lane % 4);
    for (unsigned i = 0; i < 4; ++i) {
      a[g + 8 * (i % 2)][t + 8 * (i / 2)] = operand->a[i][0];
      a[g + 8 * (i % 2)][t + 8 * (i / 2) + 1] = operand->a[i][1];
    }
    for (unsigned i = 0; i < 2; ++i) {
      b[t + 8 * i][g] = operand->b[i][0];
      b[t + 8 * i + 1][g] = operand->b[i][1];
    }
  }
  float d[16][8] = {};
  for (unsigned row = 0; row < 16; ++row) {
    for (unsigned k = 0; k < 16; ++k) {
      for (unsigned column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    float* out = static_cast<MmaOperand*>(operands[lane])->d;
    const unsigned g = lane / 4;
    const unsigned t = 2 * (lane % 4);
    for (unsigned i = 0; i < 4; ++i) out[i] += d[g + 8 * (i / 2)][t + i % 2];
  }
}

class Scheduler {
 public:
  void set_order(ThreadOrder order) { order_ = order; }
  void launch(Extent grid, Extent block, size_t shared_bytes, void (*body)(void*), void* argument);

  unsigned char* shared_memory() { return shared_->begin(); }
  Copies& copies() { return copies_[current_->index]; }
  bool copies_at_once() {
    return order_.order == Order::reverse ||
           (order_.order == Order::random && random_.below(2) == 0);
  }
  bool makes_copy_by_chance() { return order_.order == Order::random && random_.below(2) == 0; }
  void wait_for_block(const Site& site);
  void wait_for_lanes(WarpOperation operation, unsigned mask, void* operand, const Site& site);

 private:
  static void run_thread(void* scheduler);

  void run_block();
  void run_ready_threads();
  Thread* next_ready();
  void make_ready(Thread* thread);
  void enter(Thread* thread);
  void let_others_run();
  void begin_thread(Thread* thread);
  void finish_meeting_of(const Thread& thread);
  void finish_barrier();
  Meetings& meetings_of(const Thread& thread, unsigned mask) {
    return warp_meetings_[thread.index / kWarpSize][static_cast<unsigned>(__builtin_ctz(mask))];
  }
  // What the scheduler throws once it has the stack again.
  void fail(std::string message) {
    if (failure_.empty()) failure_ = std::move(message);
  }
  void throw_failure() const {
    if (!failure_.empty()) throw Error(failure_);
  }

  ThreadOrder order_;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  std::unique_ptr<SharedMemory> shared_;
  std::vector<Thread> threads_;
  std::vector<Copies> copies_;      // of each thread
  std::vector<unsigned> schedule_;  // in which threads begin, and go on after a barrier
  // Threads that may go on: `ready_count_` from `first_ready_`, after the end again from the begin.
  std::vector<unsigned> ready_;
  size_t first_ready_ = 0;
  size_t ready_count_ = 0;
  unsigned finished_ = 0;
  Random random_{1};
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_fibers_;
  Thread* current_ = nullptr;
  std::string failure_;
  Meetings barriers_;
  std::vector<std::array<Meetings, kWarpSize>> warp_meetings_;
  std::vector<Lanes> lanes_;  // of each warp
};

void check_limits(Extent grid, Extent block, size_t shared_bytes) {
  const auto refuse = [](const std::string& what) {
    throw Error("a launch that a device of compute capability 8.0 refuses: " + what);
  };
  const auto threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreadsPerBlock || block.z > 64) {
    refuse(std::to_string(threads) + " threads a block");
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) refuse("an empty grid");
  if (grid.x > kMaxGridX || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ) {
    refuse("a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
           std::to_string(grid.z));
  }
  if (shared_bytes > kMaxSharedBytes) {
    refuse(std::to_string(shared_bytes) + " bytes of shared memory");
  }
}

void Scheduler::launch(Extent grid, Extent block, size_t shared_bytes, void (*body)(void*),
                       void* argument) {
  if (current_ != nullptr) throw Error("a kernel that launches a kernel");
  check_limits(grid, block, shared_bytes);
  body_ = body;
  argument_ = argument;
  failure_.clear();
  shared_ = std::make_unique<SharedMemory>(shared_bytes);
  random_ = Random(order_.seed);
  const unsigned count = block.x * block.y * block.z;
  threads_.resize(count);
  for (unsigned i = 0; i < count; ++i) {
    threads_[i].index = i;
    threads_[i].position = {i % block.x, i / block.x % block.y, i / block.x / block.y};
  }
  copies_.resize(count);
  warp_meetings_.assign((count + kWarpSize - 1) / kWarpSize, {});
  // Fibers that an earlier kernel left in the middle are not resumed but begun anew.
  idle_fibers_.clear();
  for (const auto& fiber : fibers_) idle_fibers_.push_back(fiber.get());
  running.block_extent = block;
  running.grid_extent = grid;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (blocks > kMaxGridX) throw Error("more blocks than can be emulated");
  for (const unsigned i : in_order(static_cast<unsigned>(blocks), order_, &random_)) {
    running.block = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    shared_->renew();
    run_block();
    shared_->check();
  }
}

void Scheduler::run_block() {
  const auto count = static_cast<unsigned>(threads_.size());
  for (unsigned i = 0; i < count; ++i) {
    threads_[i].state = State::fresh;
    if (!kFibersAreShared) begin_thread(&threads_[i]);
  }
  for (Copies& copies : copies_) {
    copies.all.clear();
    copies.made = 0;
    copies.group = 0;
  }
  lanes_.assign(warp_meetings_.size(), {});
  schedule_ = in_order(count, order_, &random_);
  ready_ = schedule_;
  first_ready_ = 0;
  ready_count_ = count;
  finished_ = 0;
  for (;;) {
    run_ready_threads();
    if (finished_ == count) break;
    finish_barrier();
  }
  if (!kFibersAreShared) {
    for (Thread& thread : threads_) {
      thread.fiber->order_scheduler_after();
      idle_fibers_.push_back(thread.fiber);
    }
  }
}

void Scheduler::run_ready_threads() {
  while (Thread* next = next_ready()) {
    enter(next);
    next->fiber->resume();
    Thread* last = std::exchange(current_, nullptr);
    if (last->state == State::finished && kFibersAreShared) idle_fibers_.push_back(last->fiber);
    throw_failure();
  }
}

// The one that has waited longest; in a random order, any. None: null.
Thread* Scheduler::next_ready() {
  if (ready_count_ == 0) return nullptr;
  unsigned& first = ready_[first_ready_];
  if (order_.order == Order::random) {
    const size_t any = first_ready_ + random_.below(static_cast<unsigned>(ready_count_));
    std::swap(first, ready_[any < ready_.size() ? any : any - ready_.size()]);
  }
  if (++first_ready_ == ready_.size()) first_ready_ = 0;
  --ready_count_;
  return &threads_[first];
}

void Scheduler::make_ready(Thread* thread) {
  thread->state = State::ready;
  const size_t end = first_ready_ + ready_count_;
  ready_[end < ready_.size() ? end : end - ready_.size()] = thread->index;
  ++ready_count_;
}

void Scheduler::begin_thread(Thread* thread) {
  if (idle_fibers_.empty()) {
    fibers_.push_back(std::make_unique<Fiber>());
    idle_fibers_.push_back(fibers_.back().get());
  }
  thread->fiber = idle_fibers_.back();
  idle_fibers_.pop_back();
  thread->fiber->begin(&Scheduler::run_thread, this);
  thread->fiber->order_after_scheduler();
}

// The thread that runs from now on.
void Scheduler::enter(Thread* thread) {
  if (thread->state == State::fresh && kFibersAreShared) begin_thread(thread);
  thread->state = State::ready;
  current_ = thread;
  running.thread = thread->position;
  running.lane = thread->index % kWarpSize;
}

// Lets others run until it is this thread's turn again.
void Scheduler::let_others_run() {
  Fiber* own = current_->fiber;
  Thread* next = next_ready();
  if (next == nullptr) return own->suspend();
  enter(next);
  if (next->fiber != own) own->suspend_for(next->fiber);
}

void Scheduler::run_thread(void* scheduler) {
  auto* self = static_cast<Scheduler*>(scheduler);
  try {
    self->body_(self->argument_);
  } catch (const std::exception& error) {
    self->fail(error.what());
  }
  Thread& thread = *self->current_;
  thread.state = State::finished;
  ++self->finished_;
  self->lanes_[thread.index / kWarpSize].finished |= 1U << thread.index % kWarpSize;
}

void Scheduler::wait_for_block(const Site& site) {
  char* address = barriers_.address();
  release(address);
  current_->state = State::at_barrier;
  current_->site = site;
  let_others_run();
  acquire(address);
}

void Scheduler::wait_for_lanes(WarpOperation operation, unsigned mask, void* operand,
                               const Site& site) {
  if ((mask >> running.lane & 1U) == 0) {
    throw Error(text_of(site) + ": lane " + std::to_string(running.lane) +
                " is not in the mask that it names");
  }
  char* address = meetings_of(*current_, mask).address();
  release(address);
  current_->state = State::at_warp;
  lanes_[current_->index / kWarpSize].waiting |= 1U << running.lane;
  current_->operation = operation;
  current_->mask = mask;
  current_->operand = operand;
  current_->site = site;
  finish_meeting_of(*current_);
  let_others_run();
  acquire(address);
}

// Runs the operation that `thread` came to, if it is the last of its lanes.
void Scheduler::finish_meeting_of(const Thread& thread) {
  const unsigned first = thread.index / kWarpSize * kWarpSize;
  const unsigned mask = thread.mask;
  Lanes& lanes = lanes_[thread.index / kWarpSize];
  if (first + kWarpSize - static_cast<unsigned>(__builtin_clz(mask)) > threads_.size()) {
    throw Error(text_of(thread.site) + ": the mask names lanes that the block does not have");
  }
  if (const unsigned exited = mask & lanes.finished; exited != 0) {
    throw Error(text_of(thread.site) + ": the mask names lane " +
                std::to_string(__builtin_ctz(exited)) + ", which has exited");
  }
  if ((mask & ~lanes.waiting) != 0) return;
  std::array<void*, kWarpSize> operands{};
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1U) == 0) continue;
    const Thread& other = threads_[first + lane];
    if (other.mask != mask || !(other.site == thread.site) || other.operation != thread.operation) {
      throw Error(text_of(thread.site) + ": lanes of one mask meet in different calls, the other " +
                  text_of(other.site));
    }
    operands[lane] = other.operand;
  }
  switch (thread.operation) {
    case WarpOperation::synchronize:
      break;
    case WarpOperation::exchange:
      exchange_values(operands, mask);
      break;
    case WarpOperation::ballot:
      ballot(operands, mask);
      break;
    case WarpOperation::load_matrix:
      load_matrix(operands, /*transposed=*/false);
      break;
    case WarpOperation::load_matrix_transposed:
      load_matrix(operands, /*transposed=*/true);
      break;
    case WarpOperation::mma:
      mma(operands);
      break;
  }
  ++meetings_of(thread, mask).generation;
  lanes.waiting &= ~mask;
  for (unsigned i = 0; i < kWarpSize; ++i) {
    const unsigned lane = order_.order == Order::reverse ? kWarpSize - 1 - i : i;
    if ((mask >> lane & 1U) != 0) make_ready(&threads_[first + lane]);
  }
}

// No thread can go on: either all are at one barrier, or something is wrong.
void Scheduler::finish_barrier() {
  const Thread* first = nullptr;
  for (const Thread& thread : threads_) {
    if (thread.state == State::at_warp) {
      throw Error(text_of(thread.site) + ": thread " + std::to_string(thread.index) +
                  " waits for lanes of its mask that do not come");
    }
    if (thread.state != State::at_barrier) continue;
    if (first == nullptr) first = &thread;
    if (!(thread.site == first->site)) {
      throw Error(text_of(thread.site) + ": divergent barrier, other threads wait in " +
                  text_of(first->site));
    }
  }
  if (finished_ > 0) {
    throw Error(text_of(first->site) + ": divergent barrier, " + std::to_string(finished_) +
                " threads of the block have exited");
  }
  ++barriers_.generation;
  for (const unsigned i : schedule_) make_ready(&threads_[i]);
}

Scheduler scheduler;

}  // namespace

void set_thread_order(ThreadOrder order) { scheduler.set_order(order); }

void launch_grid(Extent grid, Extent block, size_t shared_bytes, void (*body)(void*),
                 void* argument) {
  scheduler.launch(grid, block, shared_bytes, body, argument);
}

unsigned char* dynamic_shared_memory() { return scheduler.shared_memory(); }

void synchronize_block(const Where& where) { scheduler.wait_for_block(site_of(where)); }

void meet(WarpOperation operation, unsigned mask, void* operand, const Where& where) {
  scheduler.wait_for_lanes(operation, mask, operand, site_of(where));
}

void check_alignment(const void* address, size_t bytes, const char* what) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  if (number % bytes == 0) return;
  throw Error(std::string(what) + " an address that is not a multiple of " + std::to_string(bytes) +
              ": " + std::to_string(number));
}

bool copies_at_once() { return scheduler.copies_at_once(); }

void copy_later(const Copy& copy) {
  Copies& copies = scheduler.copies();
  copies.all.emplace_back(copy, copies.group);
}

void commit_copies() { ++scheduler.copies().group; }

bool next_due_copy(int pending, Copy* copy) {
  Copies& copies = scheduler.copies();
  if (copies.made == copies.all.size()) return false;
  // Of the groups that were committed, the last `pending` may still be under way.
  if (copies.all[copies.made].second >= copies.group - pending) return false;
  *copy = copies.all[copies.made++].first;
  return true;
}

bool next_copy_by_chance(Copy* copy) {
  Copies& copies = scheduler.copies();
  if (copies.made == copies.all.size() || !scheduler.makes_copy_by_chance()) return false;
  *copy = copies.all[copies.made++].first;
  return true;
}

int64_t mma_count() { return mmas; }

}  // namespace phasekv::emulation
