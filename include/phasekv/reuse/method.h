// A reuse method answers two questions about the cached tokens of a prompt: which are computed
// again, and what the others get instead of their exact keys and values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace phasekv::reuse {

// A run of cached tokens that is processed together: one chunk, or the part of it that the engine
// scheduled in one step.
struct Segment {
  int64_t tokens = 0;        // in this run
  int64_t chunk_offset = 0;  // of the run's first token in its chunk
  int64_t chunk_tokens = 0;  // of the whole chunk
};

// Coordinates in which probes' key residuals are averaged.
enum class OffsetFrame {
  rotated,    // as keys are cached, after RoPE (the published algorithm, read literally)
  unrotated,  // each residual turned back by its own position first, and forward again when added
};

// How much of the mean residual a token receives, from its own divergence d at the check layer.
enum class WeightRule {
  clipped,   // min(d, 1), as published
  one,       // 1
  relative,  // d / mean d of the probes
};

// By which score probes are picked.
enum class ProbeRule {
  separate,  // keys' probes by key divergence, values' probes by value divergence (two sets)
  sum,       // one set by key divergence + value divergence, each divided by its mean in the chunk
  key,       // one set by key divergence
  value,     // one set by value divergence
};

// Fields left empty take the method's own definition. A method refuses what it does not have.
struct MethodOptions {
  std::optional<OffsetFrame> frame;        // agentkvshift, phaseshift
  std::optional<WeightRule> weight;        // agentkvshift, phaseshift
  std::optional<ProbeRule> probes;         // agentkvshift, phaseshift
  std::optional<int64_t> boundary_tokens;  // epic: tokens recomputed at the head of each chunk
};

struct SelectionInput {
  std::span<const Segment> segments;
  // ||fresh - cached|| per cached token at the check layer, over all KV heads and dimensions, in
  // segment order; empty when check_layer() is 0.
  std::span<const float> key_divergence;
  std::span<const float> value_divergence;
  // In [0, 1] per cached token, in segment order: the attention that the prompt's tokens after the
  // last chunk, the question, pay to its moved cached key, a mean over layers, query heads and
  // these tokens of the softmax over all keys before them; empty unless needs_attention().
  std::span<const float> attention;
  double ratio = 0.0;  // nominal recompute ratio, in [0, 1]
};

// Per cached token, in segment order.
struct Selection {
  std::vector<uint8_t> key_probe;    // 1: gets its fresh key
  std::vector<uint8_t> value_probe;  // 1: gets its fresh value; recomputed: either flag
  std::vector<float> key_weight;     // share of the mean residual added to a reused key
  std::vector<float> value_weight;   // empty weights: nothing is added
};

class Method {
 public:
  virtual ~Method() = default;

  virtual std::string_view name() const = 0;

  // Layer whose fresh keys and values decide: all rows run through the layers before it. 0: the
  // rows are known beforehand and only they run from the first layer on.
  virtual int64_t check_layer() const = 0;

  // Whether tokens that are not recomputed keep their fresh keys and values at the check layer,
  // where these are known anyway.
  virtual bool keeps_fresh_at_check_layer() const { return true; }

  // Whether the question has to run through all layers over the moved chunks before the rows are
  // chosen: SelectionInput::attention. Only with check_layer() 0.
  virtual bool needs_attention() const { return false; }

  // Whether reused tokens receive the probes' mean residual.
  virtual bool shifts() const { return false; }
  virtual OffsetFrame frame() const { return OffsetFrame::rotated; }

  // Chooses the tokens to recompute. Deterministic; ties go to the lower index.
  virtual Selection select(const SelectionInput& input) const = 0;
};

// Names of all methods, sorted.
std::vector<std::string> method_names();

// Throws invalid_argument for an unknown name or an option that the method does not have.
std::unique_ptr<Method> make_method(std::string_view name, const MethodOptions& options = {});

}  // namespace phasekv::reuse
