// Scores that need the keys alone, in double precision and plain loops.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/rotation.h"

namespace phasekv::oracle {

// R-KV's redundancy of the keys of one head, [tokens]; positions differ.
Row key_redundancy(const std::vector<Row>& keys, const std::vector<int64_t>& positions,
                   double threshold);

// KeyDiff's score of the keys of one head, [tokens]: minus the cosine with the mean of the keys of
// unit length.
Row keydiff_score(const std::vector<Row>& keys);

// The least threshold from `wanted` on that the cosine of no two keys of a head comes near.
double threshold_between_cosines(const std::vector<std::vector<Row>>& heads, double wanted);

// What a query head was calibrated to: pairs as (real, imaginary), and mean norms.
struct HeadStatistics {
  Row real;
  Row imaginary;
  Row norm;
};

// TriAttention's score of a key before RoPE that stands at `position`, seen from `time`: the mean
// over the offsets 1, 2, 4, ..., 65536 of sums over the pairs of norms and angles.
double triattention_score(const HeadStatistics& head, const Row& key,
                          const std::vector<double>& frequencies, RopePairing pairing,
                          double magnitude, int64_t position, int64_t time);

}  // namespace phasekv::oracle
