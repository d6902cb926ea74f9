#include "eviction/query_buffers.h"

#include <algorithm>

namespace phasekv::eviction {

QueryBuffers::QueryBuffers(const PolicyNeeds& needs)
    : num_buffers_(needs.buffers),
      capacity_(needs.capacity),
      buffers_(static_cast<size_t>(needs.buffers)),
      free_entries_(static_cast<size_t>(needs.buffers)) {
  clear();
}

size_t QueryBuffers::index_of(Phase phase) const {
  return num_buffers_ == 1 ? 0 : static_cast<size_t>(phase);
}

void QueryBuffers::push(int64_t position, Phase phase) {
  if (num_buffers_ == 0) return;
  const size_t index = index_of(phase);
  std::deque<BufferedQuery>& buffer = buffers_[index];
  std::vector<int64_t>& free = free_entries_[index];
  if (free.empty()) {
    free.push_back(buffer.front().entry);
    buffer.pop_front();
  }
  buffer.push_back({free.back(), position, phase});
  free.pop_back();
}

void QueryBuffers::withdraw(int64_t begin, int64_t end) {
  for (size_t index = 0; index < buffers_.size(); ++index) {
    std::erase_if(buffers_[index], [&](const BufferedQuery& query) {
      const bool leaves = begin <= query.position && query.position < end;
      if (leaves) free_entries_[index].push_back(query.entry);
      return leaves;
    });
  }
}

void QueryBuffers::clear() {
  for (size_t index = 0; index < buffers_.size(); ++index) {
    buffers_[index].clear();
    free_entries_[index].clear();
    const auto first = static_cast<int64_t>(index) * capacity_;
    for (int64_t entry = first + capacity_ - 1; entry >= first; --entry) {
      free_entries_[index].push_back(entry);
    }
  }
}

std::vector<BufferedQuery> QueryBuffers::contents() const {
  std::vector<BufferedQuery> contents;
  for (const std::deque<BufferedQuery>& buffer : buffers_) {
    contents.insert(contents.end(), buffer.begin(), buffer.end());
  }
  return contents;
}

std::vector<BufferedQuery> QueryBuffers::take_pushed() {
  std::vector<BufferedQuery> pushed;
  int64_t next = pushed_from_;
  for (const std::deque<BufferedQuery>& buffer : buffers_) {
    for (auto query = buffer.rbegin(); query != buffer.rend(); ++query) {
      if (query->position < pushed_from_) break;
      pushed.push_back(*query);
      next = std::max(next, query->position + 1);
    }
  }
  pushed_from_ = next;
  return pushed;
}

void QueryBuffers::restore(std::span<const BufferedQuery> contents) {
  clear();
  for (const BufferedQuery& query : contents) {
    const size_t index = index_of(query.phase);
    buffers_[index].push_back(query);
    std::erase(free_entries_[index], query.entry);
    pushed_from_ = std::max(pushed_from_, query.position + 1);
  }
}

}  // namespace phasekv::eviction
