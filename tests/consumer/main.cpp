// Moves one key by one position with the installed library and prints it; then asks for the
// impossible and prints the error.
#include <phasekv/error.h>
#include <phasekv/ops.h>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::vector<double> frequencies = {1.0};  // radians per position of the only pair
  const std::vector<int64_t> deltas = {1};
  std::vector<float> key = {1.0F, 0.0F};

  phasekv::RotateKeysParams params;
  params.keys = {.data = key.data(),
                 .dtype = phasekv::DataType::float32,
                 .tokens = 1,
                 .heads = 1,
                 .head_size = 2,
                 .token_stride = 2,
                 .head_stride = 2};
  params.deltas = deltas.data();
  params.rope = {
      .frequencies = frequencies.data(), .rotary_dim = 2, .pairing = phasekv::RopePairing::neox};
  params.out = params.keys;
  phasekv::rotate_keys(params);
  std::printf("rotated %.6f %.6f\n", key[0], key[1]);

  try {
    params.rope.rotary_dim = 3;
    phasekv::rotate_keys(params);
  } catch (const phasekv::Error& error) {
    std::printf("refused %s\n", error.argument().c_str());
  }
  return 0;
}
