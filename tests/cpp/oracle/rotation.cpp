#include "oracle/rotation.h"

#include <cmath>

namespace phasekv::oracle {

Row rotate(const Row& row, const std::vector<double>& frequencies, RopePairing pairing,
           int64_t delta) {
  Row rotated = row;
  if (delta == 0) return rotated;
  const size_t pairs = frequencies.size();
  for (size_t i = 0; i < pairs; ++i) {
    const size_t first = pairing == RopePairing::neox ? i : 2 * i;
    const size_t second = pairing == RopePairing::neox ? i + pairs : 2 * i + 1;
    const double phase = static_cast<double>(delta) * frequencies[i];
    const double cosine = std::cos(phase);
    const double sine = std::sin(phase);
    rotated[first] = row[first] * cosine - row[second] * sine;
    rotated[second] = row[first] * sine + row[second] * cosine;
  }
  return rotated;
}

}  // namespace phasekv::oracle
