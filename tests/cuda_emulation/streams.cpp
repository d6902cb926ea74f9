#include "streams.h"

#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <string>
#include <utility>

#include "scheduler.h"

namespace phasekv::emulation {
namespace {

constexpr size_t kAlignment = 256;
// Below it lie no heap and no stack, but what AddressSanitizer keeps, where two numbers of 32 bits
// would be taken for an address.
constexpr uintptr_t kLowestAddress = uintptr_t{1} << 44;

struct Stream {
  std::deque<std::function<void()>> work;
  uint64_t done = 0;  // pieces of work
};

Pace current_pace = Pace::at_once;
HostMemory allowed_host_memory = HostMemory::any;
Costs current_costs;
int64_t allocations_before_a_failure = -1;  // -1: none fails

std::map<void*, Stream>& streams() {
  static std::map<void*, Stream> all;
  return all;
}

// Begin of each allocation -> bytes.
std::map<uintptr_t, size_t>& allocations() {
  static std::map<uintptr_t, size_t> all;
  return all;
}

bool is_on_device(uintptr_t address, size_t bytes) {
  const auto after = allocations().upper_bound(address);
  if (after == allocations().begin()) return false;
  const auto& [begin, size] = *std::prev(after);
  return address + bytes <= begin + size;
}

// Whether anything lies there.
bool is_mapped(uintptr_t address) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char is_resident = 0;
  return mincore(reinterpret_cast<void*>(address / page * page), 1, &is_resident) == 0;
}

struct Range {
  uintptr_t begin = 0;
  size_t bytes = 0;

  bool contains(uintptr_t address) const { return address - begin < bytes; }
};

Range find_stack() {
  pthread_attr_t attributes;
  void* begin = nullptr;
  size_t bytes = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &begin, &bytes);
  pthread_attr_destroy(&attributes);
  return {reinterpret_cast<uintptr_t>(begin), bytes};
}

// Whether the address is in this thread's stack.
bool is_on_stack(uintptr_t address) {
  // Found once: each time the system would list all that is mapped.
  thread_local const Range stack = find_stack();
  return stack.contains(address);
}

// Whether the address is in the code or the data of the program or one of its libraries.
bool is_in_program(uintptr_t address) {
  const auto contains = [](dl_phdr_info* object, size_t /*size*/, void* sought) {
    for (int i = 0; i < object->dlpi_phnum; ++i) {
      const auto& segment = object->dlpi_phdr[i];
      const uintptr_t begin = object->dlpi_addr + segment.p_vaddr;
      if (segment.p_type != PT_LOAD) continue;
      if (*static_cast<uintptr_t*>(sought) - begin < segment.p_memsz) return 1;
    }
    return 0;
  };
  return dl_iterate_phdr(contains, &address) != 0;
}

bool may_be_given(uintptr_t address) {
  if (is_on_device(address, 1) || !is_mapped(address)) return true;
  if (allowed_host_memory == HostMemory::none) return false;
  return !is_on_stack(address) && !is_in_program(address);
}

void work_until(Stream& stream, uint64_t count) {
  while (stream.done < count && !stream.work.empty()) {
    const std::function<void()> work = std::move(stream.work.front());
    stream.work.pop_front();
    ++stream.done;
    work();
  }
}

}  // namespace

void set_pace(Pace pace) {
  finish_all_streams();
  current_pace = pace;
}

bool works_at_once() { return current_pace == Pace::at_once; }

void enqueue(void* stream, std::function<void()> work) {
  streams()[stream].work.push_back(std::move(work));
  if (works_at_once()) finish_stream(stream);
}

void finish_stream(void* stream) { work_until(streams()[stream], UINT64_MAX); }

void finish_all_streams() {
  for (auto& [name, stream] : streams()) work_until(stream, UINT64_MAX);
}

StreamEvent record(void* stream) {
  const Stream& recorded = streams()[stream];
  return {stream, recorded.done + recorded.work.size()};
}

void finish_until(const StreamEvent& event) { work_until(streams()[event.stream], event.after); }

void* allocate_on_device(size_t bytes) {
  const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, size);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0xFF, size);
  allocations()[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return memory;
}

void free_on_device(void* memory) {
  const auto found = allocations().find(reinterpret_cast<uintptr_t>(memory));
  if (found == allocations().end()) throw Error("what is freed was not allocated");
  std::memset(memory, 0xFF, found->second);
  allocations().erase(found);
  std::free(memory);
}

void check_on_device(const void* begin, size_t bytes, const char* what) {
  if (is_on_device(reinterpret_cast<uintptr_t>(begin), bytes)) return;
  throw Error(std::string(what) + " memory that is not a device's");
}

void allow_host_memory(HostMemory allowed) { allowed_host_memory = allowed; }

void check_argument_bytes(const void* argument, size_t bytes) {
  if (allowed_host_memory == HostMemory::any) return;
  for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
    uintptr_t word = 0;
    std::memcpy(&word, static_cast<const char*>(argument) + at, sizeof(word));
    if (word < kLowestAddress || may_be_given(word)) continue;
    const bool is_heap_allowed = allowed_host_memory == HostMemory::heap;
    throw Error(std::string("a kernel was given an address of the host's ") +
                (is_heap_allowed ? "stack or program" : "memory") + ", in byte " +
                std::to_string(at) + " of an argument");
  }
}

Costs costs() { return current_costs; }
void count_wait() { ++current_costs.waits; }
bool count_allocation() {
  ++current_costs.allocations;
  return allocations_before_a_failure < 0 || allocations_before_a_failure-- > 0;
}
void fail_allocation_after(int64_t others) { allocations_before_a_failure = others; }
void count_bytes_to_host(size_t bytes) {
  current_costs.bytes_to_host += static_cast<int64_t>(bytes);
}

}  // namespace phasekv::emulation
