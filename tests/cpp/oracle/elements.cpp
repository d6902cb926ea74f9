#include "oracle/elements.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace phasekv::oracle {

namespace {

// The 16-bit formats. float32 is the compiler's own float.
struct Format {
  int mantissa_bits;
  int exponent_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int min_exponent() const { return 1 - bias(); }
};

constexpr Format kFloat32 = {23, 8};
constexpr Format kBFloat16 = {7, 8};
constexpr Format kFloat16 = {10, 5};

Format format_of(DataType dtype) {
  if (dtype == DataType::float32) return kFloat32;
  return dtype == DataType::bfloat16 ? kBFloat16 : kFloat16;
}

double decode_half(uint32_t bits, Format format) {
  const uint32_t mantissa = bits & ((1U << format.mantissa_bits) - 1U);
  const uint32_t all_ones = (1U << format.exponent_bits) - 1U;
  const uint32_t exponent = (bits >> format.mantissa_bits) & all_ones;
  double x;
  if (exponent == all_ones) {
    x = mantissa == 0 ? std::numeric_limits<double>::infinity()
                      : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    x = std::ldexp(mantissa, format.min_exponent() - format.mantissa_bits);
  } else {
    x = std::ldexp(mantissa + std::ldexp(1.0, format.mantissa_bits),
                   static_cast<int>(exponent) - format.bias() - format.mantissa_bits);
  }
  return (bits & 0x8000U) != 0 ? -x : x;
}

std::vector<double> all_halves(Format format) {
  std::vector<double> all;
  for (uint32_t bits = 0; bits < 65536; ++bits) all.push_back(decode_half(bits, format));
  return all;
}

uint32_t encode_half(double x, Format format) {
  const uint32_t sign = std::signbit(x) ? 0x8000U : 0U;
  const uint32_t infinity = ((1U << format.exponent_bits) - 1U) << format.mantissa_bits;
  if (std::isnan(x)) return sign | infinity | (1U << (format.mantissa_bits - 1));
  if (x == 0.0) return sign;
  if (std::isinf(x)) return sign | infinity;
  // The magnitude in units of the last place, rounded; a carry into the exponent comes out right.
  const double magnitude = std::fabs(x);
  const int exponent = std::max(std::ilogb(magnitude), format.min_exponent());
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const double steps = units + std::ldexp(exponent - format.min_exponent(), format.mantissa_bits);
  return sign | (steps >= infinity ? infinity : static_cast<uint32_t>(steps));
}

}  // namespace

const double* numbers_of_halves(DataType dtype) {
  static const std::vector<double> bfloat16 = all_halves(kBFloat16);
  static const std::vector<double> float16 = all_halves(kFloat16);
  return (dtype == DataType::bfloat16 ? bfloat16 : float16).data();
}

uint32_t encode(double x, DataType dtype) {
  if (dtype == DataType::float32) return std::bit_cast<uint32_t>(static_cast<float>(x));
  return encode_half(x, format_of(dtype));
}

double half_unit(double x, DataType dtype) {
  const Format format = format_of(dtype);
  const int exponent =
      x == 0.0 ? format.min_exponent() : std::max(std::ilogb(x), format.min_exponent());
  return std::ldexp(0.5, exponent - format.mantissa_bits);
}

}  // namespace phasekv::oracle
