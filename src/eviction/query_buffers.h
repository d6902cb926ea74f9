// FIFO buffers of recent queries: which entry of a request's query memory each new query takes.
// The queries themselves lie in one array per layer, with the same entries in every layer.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

struct BufferedQuery {
  int64_t entry = 0;
  int64_t position = 0;  // logical
  Phase phase = Phase::others;
};

class QueryBuffers {
 public:
  explicit QueryBuffers(const PolicyNeeds& needs);

  int64_t num_entries() const { return num_buffers_ * capacity_; }

  // Pushes the query of the token at `position`; the oldest of a full buffer leaves.
  void push(int64_t position, Phase phase);

  // Takes out the queries of positions [begin, end), which turned out not to count.
  void withdraw(int64_t begin, int64_t end);
  void clear();

  // All buffered queries, buffer by buffer, oldest first.
  std::vector<BufferedQuery> contents() const;

  // Queries pushed since the last call and still there: their entries have to be written.
  std::vector<BufferedQuery> take_pushed();

  // The state as contents() gives it; replaces everything.
  void restore(std::span<const BufferedQuery> contents);

 private:
  size_t index_of(Phase phase) const;

  int64_t num_buffers_;
  int64_t capacity_;
  std::vector<std::deque<BufferedQuery>> buffers_;
  std::vector<std::vector<int64_t>> free_entries_;  // per buffer
  int64_t pushed_from_ = 0;                         // first position that was not taken yet
};

}  // namespace phasekv::eviction
