// The buffered queries of all requests of an evictor: one array [entries, layers, query heads, head
// size] where the tensors lie, in which each request has a range of entries. So a step's queries
// are pushed by one call in a layer, whatever the number of requests. It grows with the requests
// and does not shrink.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "phasekv/eviction/backend.h"
#include "phasekv/eviction/evictor.h"
#include "phasekv/tensor.h"

namespace phasekv::eviction {

class QueryMemory {
 public:
  QueryMemory(const EvictorShape& shape, std::shared_ptr<Backend> backend);

  // A range of free entries, its first; the array grows where it has none. What they hold is not
  // defined.
  int64_t reserve(int64_t entries);
  void release(int64_t first, int64_t entries);

  // Entries [first, first + count), [count, layers, query heads, head size], and back.
  std::vector<uint8_t> read(int64_t first, int64_t count) const;
  void write(int64_t first, std::span<const uint8_t> queries);

  // Of one layer in one entry.
  int64_t bytes_of_query() const;

  // A step's queries: row of the batch -> entry. `push` takes those of a layer, arguments as of
  // Evictor::layer.
  void begin_step();
  void schedule(int64_t batch_row, int64_t entry);
  void push(int64_t layer, const RowsView& query, const int64_t* query_rows);

  // Queries of a layer in this order, packed; until the next call.
  RowsView gather(int64_t layer, std::span<const int64_t> entries);

 private:
  RowsView view_of(int64_t layer) const;
  void grow(int64_t entries);

  EvictorShape shape_;
  std::shared_ptr<Backend> backend_;
  int64_t capacity_ = 0;             // entries
  std::map<int64_t, int64_t> free_;  // first entry -> entries, of ranges that do not touch
  TensorMemory queries_;
  TensorMemory gathered_;
  std::vector<int64_t> batch_rows_;
  std::vector<int64_t> entries_;
};

// A request's range of entries, as long as this lives.
class QueryRange {
 public:
  QueryRange(QueryMemory* memory, int64_t entries);
  ~QueryRange();
  QueryRange(QueryRange&& other) noexcept;
  QueryRange& operator=(QueryRange&& other) noexcept;

  QueryMemory& memory() const { return *memory_; }
  int64_t first() const { return first_; }
  int64_t entries() const { return entries_; }

 private:
  QueryMemory* memory_;
  int64_t first_;
  int64_t entries_;
};

}  // namespace phasekv::eviction
