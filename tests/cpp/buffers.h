// Memory for the tests: rows and paged caches in any type and layout, poisoned with NaN wherever no
// element lies, so that reading there spoils a result and writing there is found.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oracle/layouts.h"
#include "oracle/rotation.h"
#include "phasekv/layout.h"
#include "phasekv/tensor.h"

namespace phasekv {

enum class RowsOrder {
  packed,      // [tokens][heads][head_size]
  padded,      // the same with gaps between heads and tokens
  head_major,  // [heads][tokens][head_size]
};

class RowsBuffer {
 public:
  RowsBuffer(DataType dtype, int64_t tokens, int64_t heads, int64_t head_size, RowsOrder order);

  RowsView view() const;
  oracle::Row row(int64_t token, int64_t head) const;
  void set_row(int64_t token, int64_t head, const oracle::Row& row);
  uint32_t bits(int64_t token, int64_t head, int64_t dim) const;
  void set_bits(int64_t token, int64_t head, int64_t dim, uint32_t bits);

  // Standard normal values, the same for the same seed.
  void fill_random(uint32_t seed);
  // Any bits at all: infinities, NaNs with payloads, subnormals.
  void fill_random_bits(uint32_t seed);
  // Whether nothing outside the rows was written.
  bool gaps_are_poisoned() const;

 private:
  int64_t index(int64_t token, int64_t head, int64_t dim) const;

  std::vector<char> memory_;
  RowsView view_;
};

class CacheBuffer {
 public:
  CacheBuffer(const std::string& layout, DataType dtype, int64_t num_blocks, int64_t heads,
              int64_t block_size, int64_t head_size);

  PagedView view(oracle::Half half) const;
  oracle::Row row(oracle::Half half, int64_t slot, int64_t head) const;
  void set_row(oracle::Half half, int64_t slot, int64_t head, const oracle::Row& row);
  uint32_t bits(oracle::Half half, int64_t slot, int64_t head, int64_t dim) const;
  void set_bits(oracle::Half half, int64_t slot, int64_t head, int64_t dim, uint32_t bits);

  // How many elements are still poison.
  int64_t poisoned() const;
  int64_t elements() const;

 private:
  int64_t index(oracle::Half half, int64_t slot, int64_t head, int64_t dim) const;

  oracle::Layout layout_;
  std::vector<char> memory_;
  PagedKV kv_;
};

// A NaN that no op produces.
uint32_t poison(DataType dtype);

}  // namespace phasekv
