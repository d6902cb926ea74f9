// A request's keys and values in a paged cache: blocks in no order, NaN in every slot that is not
// the request's, and ids that no block has in the entries of blocks that were freed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "buffers.h"
#include "cases.h"

namespace phasekv {

class CachedRequest {
 public:
  // Tokens [first_token, first_token + tokens) of the request are cached, random ones.
  CachedRequest(const std::string& layout, DataType dtype, int64_t tokens, int64_t heads,
                int64_t head_size, int64_t block_size, int64_t first_token, uint32_t seed);
  // Of a case, from some token on.
  explicit CachedRequest(const Case& shape);

  const CacheBuffer& cache() const { return cache_; }
  CacheBuffer& cache() { return cache_; }
  PagedView key() const { return cache_.view(oracle::Half::key); }
  PagedView value() const { return cache_.view(oracle::Half::value); }
  const int32_t* block_table() const { return block_table_.data(); }
  int64_t first_token() const { return first_token_; }
  int64_t tokens() const { return tokens_; }

  // Of token first_token + index.
  int64_t slot(int64_t index) const;
  // Its rows, [kv_heads][tokens].
  std::vector<std::vector<oracle::Row>> rows(oracle::Half half) const;
  // The same rows in other blocks.
  CachedRequest in_other_blocks(uint32_t seed) const;

 private:
  void place(uint32_t seed);

  int64_t tokens_;
  int64_t heads_;
  int64_t block_size_;
  int64_t first_token_;
  std::string layout_;
  CacheBuffer cache_;
  std::vector<int32_t> block_table_;
};

}  // namespace phasekv
