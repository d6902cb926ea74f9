// In this program what tests take from the C++ heap is pinned memory: a host and a device pointer
// at once. So the tests of the ops, which know nothing of devices, hand their vectors to kernels.
#pragma once

namespace phasekv {

// Why the kernels cannot run here; null where they can.
const char* reason_without_device();

// From now on the heap gives pinned memory, or no longer: what lives before and after tests, when
// CUDA may not be there, is plain.
void give_pinned_memory(bool is_pinned);

}  // namespace phasekv
