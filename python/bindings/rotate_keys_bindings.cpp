#include <pybind11/pybind11.h>

#include "bindings.h"
#include "phasekv/ops/rotate_keys.h"
#include "rope_bindings.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

void rotate(const py::handle& keys, const py::handle& deltas, const Rope& rope,
            const py::handle& out) {
  const RowsView view = rows_of("keys", keys);
  const RotateKeysParams params = {.keys = view,
                                   .deltas = int64_list_of("deltas", deltas, view.tokens),
                                   .rope = rope.view(),
                                   .out = rows_of("out", out)};
  const py::gil_scoped_release release;
  rotate_keys(params);
}

}  // namespace

void register_rotate_keys(py::module_& module) {
  module.def("rotate_keys", &rotate, py::kw_only(), py::arg("keys"), py::arg("deltas"),
             py::arg("rope"), py::arg("out"),
             "Move keys [T, H, D] by deltas (int64 [T], positions) into out, which may be keys.");
}

}  // namespace phasekv::bindings
