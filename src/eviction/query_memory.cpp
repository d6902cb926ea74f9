#include "eviction/query_memory.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace phasekv::eviction {

QueryMemory::QueryMemory(const EvictorShape& shape, std::shared_ptr<Backend> backend)
    : shape_(shape), backend_(std::move(backend)) {}

int64_t QueryMemory::bytes_of_query() const {
  return shape_.query_heads * shape_.head_size * size_of(shape_.dtype);
}

int64_t QueryMemory::reserve(int64_t entries) {
  if (entries == 0) return 0;
  const auto fits = [entries](const auto& range) { return range.second >= entries; };
  auto found = std::find_if(free_.begin(), free_.end(), fits);
  if (found == free_.end()) {
    grow(std::max(2 * capacity_, capacity_ + entries));
    found = std::prev(free_.end());
  }
  const auto [first, available] = *found;
  free_.erase(found);
  if (available > entries) free_.emplace(first + entries, available - entries);
  return first;
}

void QueryMemory::release(int64_t first, int64_t entries) {
  if (entries == 0) return;
  const auto next = free_.find(first + entries);
  if (next != free_.end()) {
    entries += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(first);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == first) {
      before->second += entries;
      return;
    }
  }
  free_.emplace(first, entries);
}

void QueryMemory::grow(int64_t entries) {
  const int64_t bytes_of_entry = shape_.layers * bytes_of_query();
  TensorMemory larger(backend_, entries * bytes_of_entry);
  backend_->copy(queries_.data(), larger.data(), capacity_ * bytes_of_entry);
  queries_ = std::move(larger);
  const int64_t before = std::exchange(capacity_, entries);
  release(before, capacity_ - before);
}

std::vector<uint8_t> QueryMemory::read(int64_t first, int64_t count) const {
  const int64_t bytes_of_entry = shape_.layers * bytes_of_query();
  std::vector<uint8_t> queries(static_cast<size_t>(count * bytes_of_entry));
  const auto* begin = static_cast<const uint8_t*>(queries_.data());
  if (count > 0) {
    backend_->download(begin + first * bytes_of_entry, queries.data(), count * bytes_of_entry);
  }
  return queries;
}

void QueryMemory::write(int64_t first, std::span<const uint8_t> queries) {
  if (queries.empty()) return;
  auto* begin = static_cast<uint8_t*>(queries_.data());
  backend_->upload(queries.data(), begin + first * shape_.layers * bytes_of_query(),
                   static_cast<int64_t>(queries.size()));
}

RowsView QueryMemory::view_of(int64_t layer) const {
  return {.data = static_cast<uint8_t*>(queries_.data()) + layer * bytes_of_query(),
          .dtype = shape_.dtype,
          .tokens = capacity_,
          .heads = shape_.query_heads,
          .head_size = shape_.head_size,
          .token_stride = shape_.layers * shape_.query_heads * shape_.head_size,
          .head_stride = shape_.head_size};
}

void QueryMemory::begin_step() {
  batch_rows_.clear();
  entries_.clear();
}

void QueryMemory::schedule(int64_t batch_row, int64_t entry) {
  batch_rows_.push_back(batch_row);
  entries_.push_back(entry);
}

void QueryMemory::push(int64_t layer, const RowsView& query, const int64_t* query_rows) {
  if (entries_.empty()) return;
  std::vector<int64_t> rows = batch_rows_;
  if (query_rows != nullptr) {
    for (int64_t& row : rows) row = query_rows[row];
  }
  backend_->push_queries({.query = query,
                          .rows = rows.data(),
                          .entries = entries_.data(),
                          .count = static_cast<int64_t>(rows.size()),
                          .buffer = view_of(layer)});
}

RowsView QueryMemory::gather(int64_t layer, std::span<const int64_t> entries) {
  const auto count = static_cast<int64_t>(entries.size());
  if (gathered_.bytes() < count * bytes_of_query()) {
    gathered_ = TensorMemory(backend_, count * bytes_of_query());
  }
  RowsView gathered = view_of(layer);
  gathered.data = gathered_.data();
  gathered.tokens = count;
  gathered.token_stride = shape_.query_heads * shape_.head_size;
  if (count == 0) return gathered;
  std::vector<int64_t> order(entries.size());
  std::iota(order.begin(), order.end(), 0);
  // It moves queries from one array to another, whichever of them is called the buffer.
  backend_->push_queries({.query = view_of(layer),
                          .rows = entries.data(),
                          .entries = order.data(),
                          .count = count,
                          .buffer = gathered});
  return gathered;
}

QueryRange::QueryRange(QueryMemory* memory, int64_t entries)
    : memory_(memory), first_(memory->reserve(entries)), entries_(entries) {}

QueryRange::~QueryRange() { memory_->release(first_, entries_); }

QueryRange::QueryRange(QueryRange&& other) noexcept
    : memory_(other.memory_), first_(other.first_), entries_(std::exchange(other.entries_, 0)) {}

QueryRange& QueryRange::operator=(QueryRange&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(first_, other.first_);
  std::swap(entries_, other.entries_);
  return *this;
}

}  // namespace phasekv::eviction
