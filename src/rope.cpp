#include "phasekv/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "validate.h"

namespace phasekv {

namespace {

void check_positive(const char* argument, double value) {
  if (!(value > 0.0) || !std::isfinite(value)) {
    refuse(argument, std::to_string(value), "a positive number");
  }
}

// llama3: long wavelengths are slowed down by the factor, short ones kept, those between blended.
double llama3_frequency(const RopeConfig& config, double frequency) {
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  const auto context = static_cast<double>(config.original_max_position);
  if (wavelength < context / config.high_freq_factor) return frequency;
  if (wavelength > context / config.low_freq_factor) return frequency / config.factor;
  const double kept = (context / wavelength - config.low_freq_factor) /
                      (config.high_freq_factor - config.low_freq_factor);
  return (1.0 - kept) * frequency / config.factor + kept * frequency;
}

// YaRN (arXiv 2309.00071): which pair turns `rotations` times within the original context.
double yarn_pair_of(const RopeConfig& config, double rotations) {
  const auto context = static_cast<double>(config.original_max_position);
  return static_cast<double>(config.rotary_dim) *
         std::log(context / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(config.theta));
}

std::vector<double> yarn_frequencies(const RopeConfig& config, std::vector<double> frequencies) {
  double low = yarn_pair_of(config, config.beta_fast);
  double high = yarn_pair_of(config, config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.rotary_dim - 1));
  if (low == high) high += 0.001;  // as published: keeps the ramp's slope finite
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double slowed = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = slowed * frequencies[i] / config.factor + (1.0 - slowed) * frequencies[i];
  }
  return frequencies;
}

void check(const RopeConfig& config) {
  if (config.type == "mrope" || config.type == "dynamic") {
    throw Error(ErrorCode::unsupported, "rope.type", config.type,
                "its rotation depends on more than a token's position, so keys cannot be moved");
  }
  const bool is_known = config.type == "default" || config.type == "linear" ||
                        config.type == "llama3" || config.type == "yarn";
  if (!is_known) {
    throw Error(ErrorCode::unsupported, "rope.type", config.type,
                "one of default, linear, llama3, yarn");
  }
  if (config.rotary_dim < 2 || config.rotary_dim % 2 != 0) {
    refuse("rope.rotary_dim", config.rotary_dim, "even and at least 2");
  }
  check_positive("rope.theta", config.theta);
  if (config.type == "default") return;
  check_positive("rope.factor", config.factor);
  if (config.type == "linear") return;
  if (config.original_max_position < 1) {
    refuse("rope.original_max_position", config.original_max_position, "at least 1");
  }
  if (config.type == "llama3") {
    check_positive("rope.low_freq_factor", config.low_freq_factor);
    check_positive("rope.high_freq_factor", config.high_freq_factor);
    if (config.high_freq_factor <= config.low_freq_factor) {
      refuse("rope.high_freq_factor", std::to_string(config.high_freq_factor),
             "above low_freq_factor = " + std::to_string(config.low_freq_factor));
    }
    return;
  }
  check_positive("rope.beta_fast", config.beta_fast);
  check_positive("rope.beta_slow", config.beta_slow);
  if (config.theta <= 1.0) {
    refuse("rope.theta", std::to_string(config.theta), "above 1 for yarn");
  }
}

}  // namespace

std::vector<double> rope_frequencies(const RopeConfig& config) {
  check(config);
  std::vector<double> frequencies(static_cast<size_t>(config.rotary_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(config.rotary_dim);
    frequencies[i] = std::pow(config.theta, -exponent);
  }
  if (config.type == "linear") {
    for (double& frequency : frequencies) frequency /= config.factor;
  } else if (config.type == "llama3") {
    for (double& frequency : frequencies) frequency = llama3_frequency(config, frequency);
  } else if (config.type == "yarn") {
    frequencies = yarn_frequencies(config, std::move(frequencies));
  }
  return frequencies;
}

}  // namespace phasekv
