#include "cpu/kernels.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

const KernelTable& kernel_table() {
  static constexpr KernelTable kTable = {gather_blocks,
                                         scatter_blocks,
                                         rotate_keys,
                                         divergence,
                                         mean_residual,
                                         apply_shift,
                                         attend_rows,
                                         push_queries,
                                         score_keys,
                                         accumulate_attention,
                                         compact,
                                         key_redundancy,
                                         keydiff_score,
                                         expected_attention_score,
                                         triattention_score,
                                         quantize,
                                         dequantize};
  return kTable;
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
