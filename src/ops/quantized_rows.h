// The checks of quantised rows that the CPU and the CUDA ops share.
#pragma once

#include "phasekv/ops/quantize.h"

namespace phasekv {

// The sizes of `quantized`, and that it has somewhere to be. Throws Error by the member's name.
void check_quantized(const char* argument, const QuantizedRows& quantized);

// All of an op's arguments. The ops of both backends check nothing else.
void check_quantize(const QuantizeParams& params);
void check_dequantize(const DequantizeParams& params);

}  // namespace phasekv
