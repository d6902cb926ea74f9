#include <pybind11/pybind11.h>

#include <string>

#include "bindings.h"
#include "phasekv/error.h"
#include "phasekv/layout.h"
#include "placed_kv.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

[[noreturn]] void refuse_cache(const Tensor& tensor, const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, tensor.argument, tensor.shape_text(), reason);
}

PlacedKV paged_kv_of(const std::string& layout, const py::handle& kv_cache) {
  const Tensor tensor = tensor_of("kv_cache", kv_cache);
  if (tensor.dims() != 4 || tensor.shape[3] % 2 != 0) {
    refuse_cache(tensor, "[num_blocks, kv_heads, block_size, 2 * head_size]");
  }
  const bool is_packed = (tensor.shape[3] <= 1 || tensor.strides[3] == 1) &&
                         (tensor.shape[2] <= 1 || tensor.strides[2] == tensor.shape[3]);
  if (!is_packed) refuse_cache(tensor, "the last two dimensions to be contiguous");
  return {.kv = cpu_paged_kv(layout, tensor.data, data_type_of(tensor), tensor.shape[0],
                             tensor.shape[1], tensor.shape[2], tensor.shape[3] / 2,
                             tensor.strides[0], tensor.strides[1])};
}

// [num_blocks, kv_heads, block_size, head_size] with any strides.
PagedView paged_view_of(const char* argument, const py::handle& blocks, OpCall& call) {
  const Tensor tensor = tensor_of(argument, blocks, &call);
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

PlacedKV strided_paged_kv(const py::handle& key, const py::handle& value) {
  OpCall call{py::none()};
  const PagedKV kv{.key = paged_view_of("key", key, call),
                   .value = paged_view_of("value", value, call)};
  const bool is_alike =
      kv.key.dtype == kv.value.dtype && kv.key.num_blocks == kv.value.num_blocks &&
      kv.key.num_heads == kv.value.num_heads && kv.key.block_size == kv.value.block_size &&
      kv.key.head_size == kv.value.head_size;
  if (!is_alike) {
    throw Error(ErrorCode::invalid_argument, "value", tensor_of("value", value, &call).shape_text(),
                "key's shape and dtype, " + tensor_of("key", key, &call).shape_text());
  }
  return {.kv = kv, .device = call.device()};
}

}  // namespace

const PagedKV& PlacedKV::on_cpu(const char* argument) const {
  if (device != "cpu") {
    throw Error(ErrorCode::invalid_argument, std::string(argument) + ".device", device, "cpu");
  }
  return kv;
}

void register_paged_kv(py::module_& module) {
  py::class_<PlacedView>(module, "PagedView", "The keys or the values of a paged cache.")
      .def_property_readonly("num_blocks", [](const PlacedView& at) { return at.view.num_blocks; })
      .def_property_readonly("num_heads", [](const PlacedView& at) { return at.view.num_heads; })
      .def_property_readonly("block_size", [](const PlacedView& at) { return at.view.block_size; })
      .def_property_readonly("head_size", [](const PlacedView& at) { return at.view.head_size; })
      .def_readonly("device", &PlacedView::device);
  py::class_<PlacedKV>(
      module, "PagedKV",
      "A layer's paged cache. It keeps no reference to the tensor it was made from, "
      "which must outlive its use.")
      .def_property_readonly("num_blocks", [](const PlacedKV& at) { return at.kv.key.num_blocks; })
      .def_property_readonly("num_heads", [](const PlacedKV& at) { return at.kv.key.num_heads; })
      .def_property_readonly("block_size", [](const PlacedKV& at) { return at.kv.key.block_size; })
      .def_property_readonly("head_size", [](const PlacedKV& at) { return at.kv.key.head_size; })
      .def_property_readonly(
          "key",
          [](const PlacedKV& at) { return PlacedView{.view = at.kv.key, .device = at.device}; })
      .def_property_readonly(
          "value",
          [](const PlacedKV& at) { return PlacedView{.view = at.kv.value, .device = at.device}; })
      .def_readonly("device", &PlacedKV::device);
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
