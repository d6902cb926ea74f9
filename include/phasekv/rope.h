// Rotary position embedding (RoPE) as data: the frequencies of each pair of dimensions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phasekv {

enum class RopePairing {
  neox,         // dimension i is paired with i + rotary_dim / 2
  interleaved,  // dimension 2i is paired with 2i + 1 (GPT-J)
};

// What a model's configuration says about its RoPE. `type` is one of "default", "linear", "llama3",
// "yarn"; M-RoPE ("mrope") and dynamic NTK ("dynamic") depend on more than a token's position and
// are refused by name.
struct RopeConfig {
  std::string type = "default";
  double theta = 10000.0;
  int64_t rotary_dim = 0;                // even, at most the head size
  double factor = 1.0;                   // linear, llama3, yarn
  double low_freq_factor = 1;            // llama3
  double high_freq_factor = 4;           // llama3
  int64_t original_max_position = 8192;  // llama3, yarn
  double beta_fast = 32;                 // yarn
  double beta_slow = 1;                  // yarn
  bool truncate = true;                  // yarn: round the ramp's ends to whole dimensions
  RopePairing pairing = RopePairing::neox;
};

// Angular frequencies [rotary_dim / 2], radians per position. YaRN's magnitude is not part of it: a
// key that already carries the magnitude is moved by a pure rotation.
std::vector<double> rope_frequencies(const RopeConfig& config);

// What the ops need to rotate: phases are computed in double and rounded once to float32.
struct RopeView {
  const double* frequencies = nullptr;  // [rotary_dim / 2]
  int64_t rotary_dim = 0;               // dimensions [rotary_dim, head_size) are copied unchanged
  RopePairing pairing = RopePairing::neox;
};

}  // namespace phasekv
