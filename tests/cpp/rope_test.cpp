// rope_frequencies: values worked out by hand from the published formulas. The Python tests compare
// whole tables with transformers'.
#include "phasekv/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "phasekv/error.h"

namespace phasekv {
namespace {

TEST(Rope, DefaultAndLinear) {
  const std::vector<double> plain = rope_frequencies({.theta = 10000.0, .rotary_dim = 8});
  ASSERT_EQ(plain.size(), 4U);
  EXPECT_DOUBLE_EQ(plain[0], 1.0);
  EXPECT_DOUBLE_EQ(plain[1], 0.1);
  EXPECT_DOUBLE_EQ(plain[2], 0.01);
  EXPECT_DOUBLE_EQ(plain[3], 0.001);
  const std::vector<double> slow =
      rope_frequencies({.type = "linear", .theta = 10000.0, .rotary_dim = 8, .factor = 4.0});
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(slow[i], plain[i] / 4.0);
}

TEST(Rope, Llama3KeepsShortWavesSlowsLongOnesAndBlendsBetween) {
  // Wavelengths 2 pi 10^i: 6.28, 62.8, 628, 6283; kept below 400 / 4, slowed above 400 / 0.5.
  const std::vector<double> frequencies = rope_frequencies({.type = "llama3",
                                                            .theta = 10000.0,
                                                            .rotary_dim = 8,
                                                            .factor = 8.0,
                                                            .low_freq_factor = 0.5,
                                                            .high_freq_factor = 4.0,
                                                            .original_max_position = 400});
  EXPECT_DOUBLE_EQ(frequencies[0], 1.0);
  EXPECT_DOUBLE_EQ(frequencies[1], 0.1);
  const double kept = (400.0 / (200.0 * std::acos(-1.0)) - 0.5) / 3.5;
  EXPECT_NEAR(frequencies[2], kept * 0.01 + (1.0 - kept) * 0.01 / 8.0, 1e-16);
  EXPECT_DOUBLE_EQ(frequencies[3], 0.001 / 8.0);
}

TEST(Rope, YarnRampsFromKeptToSlowed) {
  // 64 dimensions, theta 10000, 4096 positions: pairs turn 32 and 1 times at
  // 64 ln(4096 / (2 pi n)) / (2 ln 10000) = 10.47 and 22.51, rounded to 10 and 23.
  const RopeConfig config{
      .type = "yarn", .rotary_dim = 64, .factor = 4.0, .original_max_position = 4096};
  const std::vector<double> frequencies = rope_frequencies(config);
  for (size_t i = 0; i < 32; ++i) {
    const double plain = std::pow(10000.0, -static_cast<double>(i) / 32.0);
    double slowed = (static_cast<double>(i) - 10.0) / 13.0;
    if (i <= 10) slowed = 0.0;
    if (i >= 23) slowed = 1.0;
    EXPECT_NEAR(frequencies[i], plain * (slowed / 4.0 + 1.0 - slowed), 1e-15) << i;
  }
}

TEST(Rope, RefusesByName) {
  struct Refusal {
    RopeConfig config;
    const char* argument;
    ErrorCode code;
  };
  for (const Refusal& refusal : {
           Refusal{{.type = "mrope", .rotary_dim = 64}, "rope.type", ErrorCode::unsupported},
           Refusal{{.type = "dynamic", .rotary_dim = 64}, "rope.type", ErrorCode::unsupported},
           Refusal{{.type = "longrope", .rotary_dim = 64}, "rope.type", ErrorCode::unsupported},
           Refusal{{.rotary_dim = 63}, "rope.rotary_dim", ErrorCode::invalid_argument},
           Refusal{{.rotary_dim = 0}, "rope.rotary_dim", ErrorCode::invalid_argument},
           Refusal{{.theta = -1.0, .rotary_dim = 64}, "rope.theta", ErrorCode::invalid_argument},
           Refusal{{.type = "linear", .rotary_dim = 64, .factor = 0.0},
                   "rope.factor",
                   ErrorCode::invalid_argument},
           Refusal{{.type = "llama3", .rotary_dim = 64, .low_freq_factor = 4.0},
                   "rope.high_freq_factor",
                   ErrorCode::invalid_argument},
           Refusal{{.type = "yarn", .rotary_dim = 64, .beta_slow = NAN},
                   "rope.beta_slow",
                   ErrorCode::invalid_argument},
       }) {
    try {
      rope_frequencies(refusal.config);
      ADD_FAILURE() << refusal.argument << " was not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), refusal.argument);
      EXPECT_EQ(error.code(), refusal.code);
    }
  }
}

}  // namespace
}  // namespace phasekv
