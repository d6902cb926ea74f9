#include "buffers.h"

#include <algorithm>
#include <map>
#include <random>

#include "oracle/elements.h"

namespace phasekv {

namespace {

std::vector<char> poisoned_memory(DataType dtype, int64_t elements) {
  std::vector<char> memory(static_cast<size_t>(elements * size_of(dtype)));
  for (int64_t i = 0; i < elements; ++i) {
    oracle::store_bits(memory.data(), dtype, i, poison(dtype));
  }
  return memory;
}

template <typename T>
int64_t count(const std::vector<char>& memory, uint32_t bits) {
  const auto* elements = reinterpret_cast<const T*>(memory.data());
  return std::count(elements, elements + memory.size() / sizeof(T), static_cast<T>(bits));
}

int64_t count_poison(const std::vector<char>& memory, DataType dtype) {
  return dtype == DataType::float32 ? count<uint32_t>(memory, poison(dtype))
                                    : count<uint16_t>(memory, poison(dtype));
}

// A few thousand standard normal numbers, to draw from: making them anew takes longer than the ops.
const std::vector<uint32_t>& normal_numbers(DataType dtype) {
  static std::map<DataType, std::vector<uint32_t>> all;
  std::vector<uint32_t>& numbers = all[dtype];
  if (numbers.empty()) {
    std::mt19937 generator(1);
    std::normal_distribution<double> normal;
    for (int i = 0; i < 4093; ++i) numbers.push_back(oracle::encode(normal(generator), dtype));
  }
  return numbers;
}

// The strides of "rows", the layout that is not one of cpu_paged_kv's.
PagedKV rows_paged_kv(void* data, DataType dtype, int64_t num_blocks, int64_t heads,
                      int64_t block_size, int64_t head_size) {
  PagedKV kv;
  kv.key.data = data;
  kv.key.dtype = dtype;
  kv.key.num_blocks = num_blocks;
  kv.key.num_heads = heads;
  kv.key.block_size = block_size;
  kv.key.head_size = head_size;
  kv.key.block_stride = heads * block_size * 2 * head_size;
  kv.key.head_stride = block_size * 2 * head_size;
  kv.key.token.outer_stride = 2 * head_size;
  kv.key.dim.outer_stride = 1;
  kv.value = kv.key;
  kv.value.data = static_cast<char*>(data) + head_size * size_of(dtype);
  return kv;
}

}  // namespace

uint32_t poison(DataType dtype) {
  switch (dtype) {
    case DataType::float32:
      return 0x7FABCDEFU;
    case DataType::bfloat16:
      return 0x7FABU;
    case DataType::float16:
      return 0x7DABU;
  }
  return 0;
}

RowsBuffer::RowsBuffer(DataType dtype, int64_t tokens, int64_t heads, int64_t head_size,
                       RowsOrder order) {
  view_ = {.data = nullptr,
           .dtype = dtype,
           .tokens = tokens,
           .heads = heads,
           .head_size = head_size,
           .token_stride = heads * head_size,
           .head_stride = head_size};
  if (order == RowsOrder::padded) {
    view_.head_stride = head_size + 3;
    view_.token_stride = heads * view_.head_stride + 5;
  } else if (order == RowsOrder::head_major) {
    view_.token_stride = head_size;
    view_.head_stride = std::max<int64_t>(tokens, 1) * head_size;
  }
  const int64_t last = tokens == 0 ? 0 : index(tokens - 1, heads - 1, head_size - 1) + 1;
  memory_ = poisoned_memory(dtype, last);
}

// Not kept, so that copies of a buffer are views of their own memory.
RowsView RowsBuffer::view() const {
  RowsView view = view_;
  view.data = const_cast<char*>(memory_.data());
  return view;
}

int64_t RowsBuffer::index(int64_t token, int64_t head, int64_t dim) const {
  return token * view_.token_stride + head * view_.head_stride + dim;
}

uint32_t RowsBuffer::bits(int64_t token, int64_t head, int64_t dim) const {
  return oracle::load_bits(memory_.data(), view_.dtype, index(token, head, dim));
}

void RowsBuffer::set_bits(int64_t token, int64_t head, int64_t dim, uint32_t bits) {
  oracle::store_bits(memory_.data(), view_.dtype, index(token, head, dim), bits);
}

oracle::Row RowsBuffer::row(int64_t token, int64_t head) const {
  oracle::Row row;
  row.reserve(static_cast<size_t>(view_.head_size));
  for (int64_t d = 0; d < view_.head_size; ++d) {
    row.push_back(oracle::decode(bits(token, head, d), view_.dtype));
  }
  return row;
}

void RowsBuffer::set_row(int64_t token, int64_t head, const oracle::Row& row) {
  for (int64_t d = 0; d < view_.head_size; ++d) {
    set_bits(token, head, d, oracle::encode(row[static_cast<size_t>(d)], view_.dtype));
  }
}

void RowsBuffer::fill_random(uint32_t seed) {
  const std::vector<uint32_t>& numbers = normal_numbers(view_.dtype);
  std::minstd_rand generator(seed + 1);
  for (int64_t token = 0; token < view_.tokens; ++token) {
    for (int64_t head = 0; head < view_.heads; ++head) {
      for (int64_t d = 0; d < view_.head_size; ++d) {
        set_bits(token, head, d, numbers[generator() % numbers.size()]);
      }
    }
  }
}

void RowsBuffer::fill_random_bits(uint32_t seed) {
  std::mt19937 generator(seed);
  for (int64_t token = 0; token < view_.tokens; ++token) {
    for (int64_t head = 0; head < view_.heads; ++head) {
      for (int64_t d = 0; d < view_.head_size; ++d) {
        set_bits(token, head, d, static_cast<uint32_t>(generator()));
        if (bits(token, head, d) == poison(view_.dtype)) set_bits(token, head, d, 0);
      }
    }
  }
}

bool RowsBuffer::gaps_are_poisoned() const {
  RowsBuffer copy = *this;
  for (int64_t token = 0; token < view_.tokens; ++token) {
    for (int64_t head = 0; head < view_.heads; ++head) {
      for (int64_t d = 0; d < view_.head_size; ++d) {
        copy.set_bits(token, head, d, poison(view_.dtype));
      }
    }
  }
  const auto elements = static_cast<int64_t>(memory_.size()) / size_of(view_.dtype);
  return count_poison(copy.memory_, view_.dtype) == elements;
}

CacheBuffer::CacheBuffer(const std::string& layout, DataType dtype, int64_t num_blocks,
                         int64_t heads, int64_t block_size, int64_t head_size)
    : layout_(oracle::layout_named(layout)) {
  const int64_t per_head = 2 * block_size * head_size;
  memory_ = poisoned_memory(dtype, num_blocks * heads * per_head);
  kv_ = layout == "rows"
            ? rows_paged_kv(memory_.data(), dtype, num_blocks, heads, block_size, head_size)
            : cpu_paged_kv(layout, memory_.data(), dtype, num_blocks, heads, block_size, head_size,
                           heads * per_head, per_head);
}

PagedView CacheBuffer::view(oracle::Half half) const {
  PagedView view = half == oracle::Half::key ? kv_.key : kv_.value;
  const int64_t offset = static_cast<char*>(view.data) - static_cast<char*>(kv_.key.data);
  view.data = const_cast<char*>(memory_.data()) + offset;
  return view;
}

int64_t CacheBuffer::index(oracle::Half half, int64_t slot, int64_t head, int64_t dim) const {
  const PagedView& key = kv_.key;
  const int64_t per_head = 2 * key.block_size * key.head_size;
  const int64_t block = slot / key.block_size;
  return (block * key.num_heads + head) * per_head +
         oracle::offset_in_head(layout_, half, key.block_size, key.head_size, slot % key.block_size,
                                dim);
}

uint32_t CacheBuffer::bits(oracle::Half half, int64_t slot, int64_t head, int64_t dim) const {
  return oracle::load_bits(memory_.data(), kv_.key.dtype, index(half, slot, head, dim));
}

void CacheBuffer::set_bits(oracle::Half half, int64_t slot, int64_t head, int64_t dim,
                           uint32_t bits) {
  oracle::store_bits(memory_.data(), kv_.key.dtype, index(half, slot, head, dim), bits);
}

oracle::Row CacheBuffer::row(oracle::Half half, int64_t slot, int64_t head) const {
  oracle::Row row;
  row.reserve(static_cast<size_t>(kv_.key.head_size));
  for (int64_t d = 0; d < kv_.key.head_size; ++d) {
    row.push_back(oracle::decode(bits(half, slot, head, d), kv_.key.dtype));
  }
  return row;
}

void CacheBuffer::set_row(oracle::Half half, int64_t slot, int64_t head, const oracle::Row& row) {
  for (int64_t d = 0; d < kv_.key.head_size; ++d) {
    set_bits(half, slot, head, d, oracle::encode(row[static_cast<size_t>(d)], kv_.key.dtype));
  }
}

int64_t CacheBuffer::poisoned() const { return count_poison(memory_, kv_.key.dtype); }

int64_t CacheBuffer::elements() const {
  return static_cast<int64_t>(memory_.size()) / size_of(kv_.key.dtype);
}

}  // namespace phasekv
