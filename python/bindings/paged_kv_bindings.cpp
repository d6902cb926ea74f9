#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/layout.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

[[noreturn]] void refuse_cache(const Tensor& tensor, const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, tensor.argument, tensor.shape_text(), reason);
}

PagedKV paged_kv_of(const std::string& layout, const py::handle& kv_cache) {
  const Tensor tensor = tensor_of("kv_cache", kv_cache);
  if (tensor.dims() != 4 || tensor.shape[3] % 2 != 0) {
    refuse_cache(tensor, "[num_blocks, kv_heads, block_size, 2 * head_size]");
  }
  const bool is_packed = (tensor.shape[3] <= 1 || tensor.strides[3] == 1) &&
                         (tensor.shape[2] <= 1 || tensor.strides[2] == tensor.shape[3]);
  if (!is_packed) refuse_cache(tensor, "the last two dimensions to be contiguous");
  return cpu_paged_kv(layout, tensor.data, data_type_of(tensor), tensor.shape[0], tensor.shape[1],
                      tensor.shape[2], tensor.shape[3] / 2, tensor.strides[0], tensor.strides[1]);
}

// [num_blocks, kv_heads, block_size, head_size] with any strides.
PagedView paged_view_of(const char* argument, const py::handle& blocks) {
  const Tensor tensor = tensor_of(argument, blocks);
  if (tensor.dims() != 4) {
    throw Error(ErrorCode::invalid_argument, argument, tensor.shape_text(),
                "[num_blocks, kv_heads, block_size, head_size]");
  }
  PagedView view;
  view.data = tensor.data;
  view.dtype = data_type_of(tensor);
  view.num_blocks = tensor.shape[0];
  view.num_heads = tensor.shape[1];
  view.block_size = tensor.shape[2];
  view.head_size = tensor.shape[3];
  view.block_stride = tensor.strides[0];
  view.head_stride = tensor.strides[1];
  view.token.outer_stride = tensor.strides[2];
  view.dim.outer_stride = tensor.strides[3];
  return view;
}

PagedKV strided_paged_kv(const py::handle& key, const py::handle& value) {
  const PagedKV kv{.key = paged_view_of("key", key), .value = paged_view_of("value", value)};
  const bool is_alike =
      kv.key.dtype == kv.value.dtype && kv.key.num_blocks == kv.value.num_blocks &&
      kv.key.num_heads == kv.value.num_heads && kv.key.block_size == kv.value.block_size &&
      kv.key.head_size == kv.value.head_size;
  if (!is_alike) {
    throw Error(ErrorCode::invalid_argument, "value", tensor_of("value", value).shape_text(),
                "key's shape and dtype, " + tensor_of("key", key).shape_text());
  }
  return kv;
}

}  // namespace

void register_paged_kv(py::module_& module) {
  py::class_<PagedView>(module, "PagedView", "The keys or the values of a paged cache.")
      .def_readonly("num_blocks", &PagedView::num_blocks)
      .def_readonly("num_heads", &PagedView::num_heads)
      .def_readonly("block_size", &PagedView::block_size)
      .def_readonly("head_size", &PagedView::head_size);
  py::class_<PagedKV>(
      module, "PagedKV",
      "A layer's paged cache. It keeps no reference to the tensor it was made from, "
      "which must outlive its use.")
      .def_property_readonly("num_blocks", [](const PagedKV& kv) { return kv.key.num_blocks; })
      .def_property_readonly("num_heads", [](const PagedKV& kv) { return kv.key.num_heads; })
      .def_property_readonly("block_size", [](const PagedKV& kv) { return kv.key.block_size; })
      .def_property_readonly("head_size", [](const PagedKV& kv) { return kv.key.head_size; })
      .def_readonly("key", &PagedKV::key)
      .def_readonly("value", &PagedKV::value);
  module.def(
      "cpu_paged_kv", &paged_kv_of, py::arg("layout"), py::arg("kv_cache"),
      "View vLLM's CPU cache tensor [num_blocks, kv_heads, block_size, 2 * head_size] in the "
      "layout vec, vec16 or amx.");
  module.def(
      "strided_paged_kv", &strided_paged_kv, py::kw_only(), py::arg("key"), py::arg("value"),
      "View blocks of keys and of values, each [num_blocks, kv_heads, block_size, head_size] "
      "with any strides. The tensors must outlive the view.");
}

}  // namespace phasekv::bindings
