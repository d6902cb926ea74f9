// What calibration measures for TriAttention (arXiv 2604.04921): the mean query of every head
// before RoPE, and the mean magnitude of each of its rotation pairs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phasekv/rope.h"

namespace phasekv::eviction {

struct TriattentionStatistics {
  std::string model;  // identity of the model they were measured on
  int64_t layers = 0;
  int64_t query_heads = 0;
  int64_t rotary_dim = 0;
  RopePairing pairing = RopePairing::neox;
  std::vector<double> frequencies;  // [rotary_dim / 2] radians per position
  double magnitude = 1.0;           // RoPE's amplitude factor (YaRN), already in cached keys
  std::vector<float> mean_query;    // [layers, query heads, rotary_dim / 2, 2] real, imaginary
  std::vector<float> mean_norm;     // [layers, query heads, rotary_dim / 2]
};

}  // namespace phasekv::eviction
