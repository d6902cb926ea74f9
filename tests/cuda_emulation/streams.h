// Streams, events and memory of the emulated device. Work of a stream is done as it is asked for,
// or, if a test wants that, as late as a device may do it: when somebody waits for it. Then what
// the host changes or gives back too soon is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace phasekv::emulation {

enum class Pace { at_once, when_waited_for };

void set_pace(Pace pace);
bool works_at_once();

// Work of a stream, after all that was asked of it before.
void enqueue(void* stream, std::function<void()> work);

// Do a stream's work, or everyone's.
void finish_stream(void* stream);
void finish_all_streams();

// A point in a stream's work.
struct StreamEvent {
  void* stream = nullptr;
  uint64_t after = 0;  // pieces of work
};
StreamEvent record(void* stream);
void finish_until(const StreamEvent& event);

// ---- Memory. The host can use it too, as no device's is; what is new holds NaN.

void* allocate_on_device(size_t bytes);
void free_on_device(void* memory);

// Throws Error unless [begin, begin + bytes) is memory of a device.
void check_on_device(const void* begin, size_t bytes, const char* what);

// What of the host's memory kernels may be given. Where not all of it, every address in a kernel's
// arguments is checked.
enum class HostMemory {
  any,
  heap,  // as the tests of the ops may: on a device their heap is its memory too, a stack is not
  none,
};
void allow_host_memory(HostMemory allowed);
void check_argument_bytes(const void* argument, size_t bytes);

// How often the host waited for a stream or an event, and asked for memory of a device or pinned
// memory, and what it had copied from the device: so that a test can see that it did not.
struct Costs {
  int64_t waits = 0;
  int64_t allocations = 0;
  int64_t bytes_to_host = 0;

  bool operator==(const Costs&) const = default;
};
Costs costs();
void count_wait();
// Whether there is memory for it.
bool count_allocation();
void count_bytes_to_host(size_t bytes);

// Lets the allocation after so many others fail, once.
void fail_allocation_after(int64_t others);

}  // namespace phasekv::emulation
