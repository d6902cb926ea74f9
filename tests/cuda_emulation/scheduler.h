// Runs CUDA threads on a CPU, a block after the other, and one fiber per thread of a block. A
// thread runs until it waits for others, so the order in which threads are taken decides what a
// missing barrier does: each kernel is run in several.
//
// Not modelled: several blocks at once, weak memory, registers, alignment (UBSan sees that). Only
// one thread of the operating system may launch. Streams are in streams.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>

namespace phasekv::emulation {

// What a device would answer with wrong results, a hang or an error code.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Order { forward, reverse, random };

// Of blocks in a grid, and of threads in a block.
struct ThreadOrder {
  Order order = Order::forward;
  uint64_t seed = 1;  // of random
};

void set_thread_order(ThreadOrder order);

struct Extent {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// The coordinates of the thread that is running.
struct Coordinates {
  Extent thread;
  Extent block;
  Extent block_extent;
  Extent grid_extent;
  unsigned lane = 0;
};
extern Coordinates running;

// ---- Limits of compute capability 8.0, and of 8.6, 8.9 and 12.0 where theirs are lower.
inline constexpr unsigned kMaxThreadsPerBlock = 1024;
inline constexpr unsigned kMaxGridX = 0x7FFFFFFF;
inline constexpr unsigned kMaxGridYZ = 65535;
inline constexpr size_t kMaxSharedBytes = 99 * 1024;
inline constexpr size_t kSharedBytesWithoutOptIn = 48 * 1024;
inline constexpr size_t kMaxParameterBytes = 4096;

// Runs `body(argument)` once per thread. Throws Error.
void launch_grid(Extent grid, Extent block, size_t shared_bytes, void (*body)(void*),
                 void* argument);

// Of the running block: exactly the bytes asked for at the launch, all 0xFF (NaN) when it begins.
unsigned char* dynamic_shared_memory();

// ---- Where threads wait for each other. `where` is the call in the kernel.
using Where = std::source_location;

void synchronize_block(const Where& where);

enum class WarpOperation : uint8_t {
  synchronize,
  exchange,
  ballot,
  load_matrix,
  load_matrix_transposed,
  mma
};

// All lanes of `mask` meet in the same call. When the last has come, the operation is done on what
// the lanes brought, and all go on.
struct ExchangeOperand {
  uint64_t value;
  uint64_t result;
  int source;  // a lane of the mask
};
struct BallotOperand {
  bool vote;
  unsigned votes;
};
struct MatrixRowOperand {
  uint16_t row[8];
  uint32_t result[4];
};
struct MmaOperand {
  float a[4][2];  // the two halves of 4 registers
  float b[2][2];  // of 2 registers
  float* d;       // 4 registers, added to
};
void meet(WarpOperation operation, unsigned mask, void* operand, const Where& where);

// What a device answers with an error. `what` begins the message.
void check_alignment(const void* address, size_t bytes, const char* what);

// ---- cp.async: a copy is made when the thread waits for it, as late as a device may do it, in the
// forward order; as early, in the reverse one; either, or at any barrier between, in a random one.
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  int bytes;
  int valid_bytes;  // are copied, the others are zeros
};
bool copies_at_once();
void copy_later(const Copy& copy);
void commit_copies();
// The next copy of a group that is not among the `pending` last ones; false: no more.
bool next_due_copy(int pending, Copy* copy);
// The next copy, in a random order and if it is its turn; false: none now.
bool next_copy_by_chance(Copy* copy);

// How many operations of tensor cores have been run, so that a test can see that they were.
int64_t mma_count();

}  // namespace phasekv::emulation
