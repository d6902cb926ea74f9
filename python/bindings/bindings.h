// What each file of bindings adds to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace phasekv::bindings {

void register_errors(pybind11::module_& module);
void register_cpu(pybind11::module_& module);
void register_cuda(pybind11::module_& module);
void register_rope(pybind11::module_& module);
void register_paged_kv(pybind11::module_& module);

void register_accumulate_attention(pybind11::module_& module);
void register_apply_shift(pybind11::module_& module);
void register_attend_rows(pybind11::module_& module);
void register_compact(pybind11::module_& module);
void register_divergence(pybind11::module_& module);
void register_expected_attention_score(pybind11::module_& module);
void register_gather_scatter(pybind11::module_& module);
void register_key_redundancy(pybind11::module_& module);
void register_keydiff_score(pybind11::module_& module);
void register_mean_residual(pybind11::module_& module);
void register_push_queries(pybind11::module_& module);
void register_quantize(pybind11::module_& module);
void register_rotate_keys(pybind11::module_& module);
void register_score_keys(pybind11::module_& module);
void register_select_top(pybind11::module_& module);
void register_triattention_score(pybind11::module_& module);

void register_chunk_index(pybind11::module_& module);
void register_eviction(pybind11::module_& module);
void register_reuse(pybind11::module_& module);

void register_phases(pybind11::module_& module);

}  // namespace phasekv::bindings
