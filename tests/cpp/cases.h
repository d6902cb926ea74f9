// The one list of shapes that every op is tested in.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "buffers.h"
#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv {

enum class SlotOrder {
  runs,       // consecutive tokens in blocks that are in no order
  padded,     // the same with padding slots among them
  scattered,  // no two tokens beside each other
};

struct Case {
  uint32_t seed = 0;
  std::string layout;
  DataType dtype = DataType::float32;        // of the cache
  DataType other_dtype = DataType::float32;  // of rows whose type is free
  int64_t tokens = 0;
  int64_t heads = 1;
  int64_t head_size = 64;
  int64_t block_size = 16;
  int64_t rotary_dim = 64;
  RopePairing pairing = RopePairing::neox;
  RowsOrder rows_order = RowsOrder::packed;
  SlotOrder slot_order = SlotOrder::runs;

  int64_t num_blocks() const { return (tokens + kFirstOffset) / block_size + 3; }
  // [tokens], each at most once.
  std::vector<int64_t> slots() const;
  // The same tokens without padding.
  std::vector<int64_t> slots_without_padding() const;
  // [segments + 1]; some segments are empty, and there is one even for no tokens.
  std::vector<int64_t> segment_starts() const;
  std::vector<double> frequencies() const;
  // `count` position deltas of both signs, 0 and the largest among them.
  std::vector<int64_t> deltas(int64_t count) const;
  // `count` indices in [0, limit).
  std::vector<int64_t> rows(int64_t count, int64_t limit) const;

  static constexpr int64_t kFirstOffset = 5;  // of the first token in its block
};

std::ostream& operator<<(std::ostream& stream, const Case& shape);

const std::vector<Case>& all_cases();

// These, and heads wider than any attention's, for ops that do not mind.
const std::vector<Case>& cases_of_any_width();

}  // namespace phasekv
