// phasekv::Error arrives in Python as the classes of phasekv/errors.py.
#include <pybind11/pybind11.h>

#include <exception>

#include "bindings.h"
#include "phasekv/error.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

const char* class_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "InvalidArgumentError";
    case ErrorCode::unsupported:
      return "UnsupportedError";
    case ErrorCode::missing_capability:
      return "MissingCapabilityError";
  }
  return "Error";
}

void raise(const Error& error) {
  try {
    const py::object type = py::module_::import("phasekv.errors").attr(class_name(error.code()));
    const py::object raised = type(error.argument(), error.value(), error.reason());
    PyErr_SetObject(type.ptr(), raised.ptr());
  } catch (py::error_already_set& failure) {
    failure.restore();
  }
}

}  // namespace

void register_errors(py::module_& module) {
  const py::module_ errors = py::module_::import("phasekv.errors");
  for (const char* name :
       {"Error", "InvalidArgumentError", "UnsupportedError", "MissingCapabilityError"}) {
    module.attr(name) = errors.attr(name);
  }
  // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11 asks for this signature.
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace phasekv::bindings
