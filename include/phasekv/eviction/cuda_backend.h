// An evictor whose tensors lie on a CUDA device. A step without events launches kernels and neither
// waits nor allocates; one with events waits once, for the scores of all layers.
#pragma once

#include <memory>

#include "phasekv/cuda.h"
#include "phasekv/eviction/backend.h"

namespace phasekv::eviction {

// Of one evictor.
class CudaBackend : public Backend {
 public:
  // What comes goes to this stream; what went to another one is waited for. At first it is the
  // default stream.
  virtual void use_stream(cuda::Stream stream) = 0;
};

// Throws missing_capability as cuda::check_device does.
std::shared_ptr<CudaBackend> make_cuda_backend(int device);

}  // namespace phasekv::eviction
