#include "phasekv/ops/quantize.h"

#include "dispatch.h"
#include "ops/quantized_rows.h"

namespace phasekv {

void quantize(const QuantizeParams& params) {
  check_quantize(params);
  if (params.rows.tokens > 0) active_kernels().quantize(params);
}

void dequantize(const DequantizeParams& params) {
  check_dequantize(params);
  if (params.rows.tokens > 0) active_kernels().dequantize(params);
}

}  // namespace phasekv
