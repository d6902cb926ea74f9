// In this program all memory of the C++ heap is managed: a host and a device pointer at once. So
// the tests of the ops, which know nothing of devices, hand their vectors to kernels.
#pragma once

namespace phasekv {

// Why the kernels cannot run here; null where they can.
const char* reason_without_device();

}  // namespace phasekv
