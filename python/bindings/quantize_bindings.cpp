#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "choices.h"
#include "phasekv/error.h"
#include "phasekv/ops/quantize.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {
namespace {

constexpr std::pair<const char*, GroupAxis> kAxes[] = {{"tokens", GroupAxis::tokens},
                                                       {"channels", GroupAxis::channels}};

int64_t ceil_div(int64_t a, int64_t b) { return b < 1 ? 0 : (a + b - 1) / b; }

// A contiguous tensor whose shape follows from that of the rows.
template <typename T>
T* part_of(const char* argument, const py::handle& object, const char* dtype,
           const std::vector<int64_t>& shape, OpCall& call) {
  return static_cast<T*>(contiguous_tensor(argument, object, dtype, shape, &call).data);
}

QuantizedRows quantized_of(const py::handle& codes, const py::handle& scales,
                           const py::handle& zero_points, int bits, int64_t group_size,
                           const std::string& axis, int64_t tokens, const RowsView& rows,
                           OpCall& call) {
  QuantizedRows quantized = {
      .tokens = tokens,
      .heads = rows.heads,
      .head_size = rows.head_size,
      .bits = bits,
      .group_size = group_size,
      .axis = parse_choice<GroupAxis>("axis", axis, kAxes).value_or(GroupAxis::tokens)};
  const auto shape = [&](int64_t size) -> std::vector<int64_t> {
    if (quantized.axis == GroupAxis::tokens) {
      return {ceil_div(tokens, size), rows.heads, rows.head_size};
    }
    return {tokens, rows.heads, ceil_div(rows.head_size, size)};
  };
  quantized.codes = part_of<uint32_t>("codes", codes, "int32", shape(bits == 4 ? 8 : 16), call);
  quantized.scales = part_of<uint16_t>("scales", scales, "float16", shape(group_size), call);
  quantized.zero_points =
      part_of<uint16_t>("zero_points", zero_points, "float16", shape(group_size), call);
  return quantized;
}

void quantize_rows(const py::handle& rows, int bits, int64_t group_size, const std::string& axis,
                   const py::handle& codes, const py::handle& scales, const py::handle& zero_points,
                   const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("rows", rows, &call);
  const QuantizeParams params = {.rows = view,
                                 .out = quantized_of(codes, scales, zero_points, bits, group_size,
                                                     axis, view.tokens, view, call)};
  call.run([&] { quantize(params); }, [&](cuda::Stream on) { cuda::quantize(params, on); });
}

void dequantize_rows(const py::handle& codes, const py::handle& scales,
                     const py::handle& zero_points, int bits, int64_t group_size,
                     const std::string& axis, int64_t tokens, int64_t first_token,
                     const py::handle& out, const py::handle& stream) {
  OpCall call(stream);
  const RowsView view = rows_of("out", out, &call);
  const DequantizeParams params = {.quantized = quantized_of(codes, scales, zero_points, bits,
                                                             group_size, axis, tokens, view, call),
                                   .first_token = first_token,
                                   .rows = view};
  call.run([&] { dequantize(params); }, [&](cuda::Stream on) { cuda::dequantize(params, on); });
}

}  // namespace

void register_quantize(py::module_& module) {
  module.def("quantize", &quantize_rows, py::kw_only(), py::arg("rows"), py::arg("bits"),
             py::arg("group_size"), py::arg("axis"), py::arg("codes"), py::arg("scales"),
             py::arg("zero_points"), py::arg("stream") = py::none(),
             "Quantise rows [T, H, D] to 2 or 4 bits in groups along \"tokens\" (codes int32 "
             "[ceil(T / n), H, D] for n = 32 / bits, scales and zero_points float16 "
             "[ceil(T / group_size), H, D]) or \"channels\" ([T, H, ceil(D / n)], "
             "[T, H, ceil(D / group_size)]).");
  module.def("dequantize", &dequantize_rows, py::kw_only(), py::arg("codes"), py::arg("scales"),
             py::arg("zero_points"), py::arg("bits"), py::arg("group_size"), py::arg("axis"),
             py::arg("tokens"), py::arg("first_token") = 0, py::arg("out"),
             py::arg("stream") = py::none(),
             "The reverse, for out [N, H, D], N of the quantised tokens from first_token on.");
}

}  // namespace phasekv::bindings
