#include "cached_request.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace phasekv {

namespace {

using oracle::Half;

constexpr int32_t kFreedBlock = -7;
constexpr int64_t kOtherBlocks = 3;  // that the request does not have

int64_t first_token_of(const Case& shape) {
  constexpr int64_t kSome[] = {0, 5, 64, 131, 16};
  return kSome[shape.seed % 5];
}

}  // namespace

CachedRequest::CachedRequest(const std::string& layout, DataType dtype, int64_t tokens,
                             int64_t heads, int64_t head_size, int64_t block_size,
                             int64_t first_token, uint32_t seed)
    : tokens_(tokens),
      heads_(heads),
      block_size_(block_size),
      first_token_(first_token),
      layout_(layout),
      cache_(layout, dtype, tokens / block_size + 2 + kOtherBlocks, heads, block_size, head_size) {
  place(seed);
  for (const Half half : {Half::key, Half::value}) {
    RowsBuffer rows(dtype, tokens, heads, head_size, RowsOrder::packed);
    rows.fill_random(2 * seed + (half == Half::key ? 0 : 1));
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t d = 0; d < head_size; ++d) {
          cache_.set_bits(half, slot(i), head, d, rows.bits(i, head, d));
        }
      }
    }
  }
}

CachedRequest::CachedRequest(const Case& shape)
    : CachedRequest(shape.layout, shape.dtype, shape.tokens, shape.heads, shape.head_size,
                    shape.block_size, first_token_of(shape), shape.seed) {}

void CachedRequest::place(uint32_t seed) {
  std::vector<int32_t> blocks(static_cast<size_t>(tokens_ / block_size_ + 2 + kOtherBlocks));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(seed + 5));
  block_table_.assign(static_cast<size_t>(first_token_ / block_size_), kFreedBlock);
  const int64_t last = (first_token_ + tokens_ + block_size_ - 1) / block_size_;
  while (static_cast<int64_t>(block_table_.size()) < last) {
    block_table_.push_back(blocks.back());
    blocks.pop_back();
  }
}

int64_t CachedRequest::slot(int64_t index) const {
  const int64_t token = first_token_ + index;
  return block_table_[static_cast<size_t>(token / block_size_)] * block_size_ + token % block_size_;
}

std::vector<std::vector<oracle::Row>> CachedRequest::rows(Half half) const {
  std::vector<std::vector<oracle::Row>> rows(static_cast<size_t>(heads_));
  for (int64_t head = 0; head < heads_; ++head) {
    for (int64_t i = 0; i < tokens_; ++i) {
      rows[static_cast<size_t>(head)].push_back(cache_.row(half, slot(i), head));
    }
  }
  return rows;
}

CachedRequest CachedRequest::in_other_blocks(uint32_t seed) const {
  const PagedView view = key();
  CachedRequest other = *this;
  other.cache_ =
      CacheBuffer(layout_, view.dtype, view.num_blocks, heads_, block_size_, view.head_size);
  other.place(seed);
  for (const Half half : {Half::key, Half::value}) {
    for (int64_t i = 0; i < tokens_; ++i) {
      for (int64_t head = 0; head < heads_; ++head) {
        for (int64_t d = 0; d < view.head_size; ++d) {
          other.cache_.set_bits(half, other.slot(i), head, d, cache_.bits(half, slot(i), head, d));
        }
      }
    }
  }
  return other;
}

}  // namespace phasekv
