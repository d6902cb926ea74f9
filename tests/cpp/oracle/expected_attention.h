// ExpectedAttention's score in double precision and plain loops: every future position and every
// query for itself, without a covariance.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/rotation.h"

namespace phasekv::oracle {

// Of one KV head.
struct ExpectedAttention {
  std::vector<Row> keys;
  std::vector<Row> values;
  std::vector<int64_t> positions;         // of the keys
  std::vector<std::vector<Row>> queries;  // [group][queries], rotated to their positions
  std::vector<int64_t> query_positions;
  std::vector<double> frequencies;
  RopePairing pairing = RopePairing::neox;
  int64_t sinks = 0;
  int64_t next_position = 0;
  int64_t horizon = 0;
  double scale = 1.0;
};

Row expected_attention_score(const ExpectedAttention& head);

}  // namespace phasekv::oracle
