#include "bindings.h"

PYBIND11_MODULE(_core, module) {
  using namespace phasekv::bindings;
  module.doc() =
      "The C++ core of PhaseKV. Tensors are any objects with data_ptr(), shape, stride(), dtype "
      "and "
      "device, as torch's are. An op runs where its tensors lie, on the CPU or on a CUDA device, "
      "there "
      "on the stream that is given as an integer. Ops run without the GIL and write into the "
      "tensors "
      "they are given. include/phasekv/ops describes each of them.";
  register_errors(module);
  register_cpu(module);
  register_cuda(module);
  register_rope(module);
  register_paged_kv(module);
  register_accumulate_attention(module);
  register_apply_shift(module);
  register_attend_rows(module);
  register_compact(module);
  register_divergence(module);
  register_expected_attention_score(module);
  register_gather_scatter(module);
  register_key_redundancy(module);
  register_keydiff_score(module);
  register_mean_residual(module);
  register_push_queries(module);
  register_quantize(module);
  register_rotate_keys(module);
  register_score_keys(module);
  register_select_top(module);
  register_triattention_score(module);
  register_chunk_index(module);
  register_eviction(module);
  register_reuse(module);
  register_phases(module);
}
