#include "validate.h"

#include <cmath>

namespace phasekv {

namespace {

constexpr double kMaxFrequency = 4.0;

std::string element(const std::string& list, int64_t index) {
  return list + "[" + std::to_string(index) + "]";
}

std::string member(const std::string& argument, const char* name) { return argument + "." + name; }

void check_at_least(const std::string& argument, int64_t value, int64_t least) {
  if (value < least) refuse(argument, value, "at least " + std::to_string(least));
}

void check_data(const std::string& argument, const void* data, DataType dtype, bool needed) {
  if (needed && data == nullptr) refuse(argument, "null", "a pointer to the data");
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address % static_cast<uintptr_t>(size_of(dtype)) != 0) {
    refuse(argument, std::to_string(address), "aligned to an element");
  }
}

void check_axis(const std::string& argument, const AxisStride& axis) {
  check_at_least(argument + ".tile", axis.tile, 1);
  check_at_least(argument + ".outer_stride", axis.outer_stride, 0);
  check_at_least(argument + ".inner_stride", axis.inner_stride, 0);
}

}  // namespace

std::string name_of(DataType dtype) {
  switch (dtype) {
    case DataType::float32:
      return "float32";
    case DataType::bfloat16:
      return "bfloat16";
    case DataType::float16:
      return "float16";
  }
  return "unknown";
}

void refuse(const std::string& argument, const std::string& value, const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, argument, value, reason);
}

void refuse(const std::string& argument, int64_t value, const std::string& reason) {
  refuse(argument, std::to_string(value), reason);
}

void check_not_null(const char* argument, const void* list, int64_t count) {
  if (count > 0 && list == nullptr) {
    refuse(argument, "null", std::to_string(count) + " entries");
  }
}

void check_rows(const char* argument, const RowsView& rows) {
  check_at_least(member(argument, "tokens"), rows.tokens, 0);
  check_at_least(member(argument, "heads"), rows.heads, 1);
  check_at_least(member(argument, "head_size"), rows.head_size, 1);
  check_at_least(member(argument, "token_stride"), rows.token_stride, 0);
  check_at_least(member(argument, "head_stride"), rows.head_stride, 0);
  check_data(member(argument, "data"), rows.data, rows.dtype, rows.tokens > 0);
}

void check_output_rows(const char* argument, const RowsView& rows) {
  check_rows(argument, rows);
  if (rows.tokens > 1) {
    check_at_least(member(argument, "token_stride"), rows.token_stride, rows.head_size);
  }
  if (rows.heads > 1) {
    check_at_least(member(argument, "head_stride"), rows.head_stride, rows.head_size);
  }
}

void check_blocks(const char* argument, const PagedView& blocks) {
  check_at_least(member(argument, "num_blocks"), blocks.num_blocks, 0);
  check_at_least(member(argument, "num_heads"), blocks.num_heads, 1);
  check_at_least(member(argument, "block_size"), blocks.block_size, 1);
  check_at_least(member(argument, "head_size"), blocks.head_size, 1);
  check_at_least(member(argument, "block_stride"), blocks.block_stride, 0);
  check_at_least(member(argument, "head_stride"), blocks.head_stride, 0);
  check_axis(member(argument, "token"), blocks.token);
  check_axis(member(argument, "dim"), blocks.dim);
  check_data(member(argument, "data"), blocks.data, blocks.dtype, blocks.num_blocks > 0);
}

void check_equal(const std::string& argument, int64_t value, const std::string& other,
                 int64_t expected) {
  if (value != expected) {
    refuse(argument, value, std::to_string(expected) + " like " + other);
  }
}

void check_same_dtype(const std::string& argument, DataType dtype, const std::string& other,
                      DataType expected) {
  if (dtype != expected) {
    refuse(argument + ".dtype", name_of(dtype), name_of(expected) + " like " + other);
  }
}

void check_same_heads(const char* argument, const RowsView& rows, const char* other,
                      const RowsView& expected) {
  check_equal(member(argument, "heads"), rows.heads, other, expected.heads);
  check_equal(member(argument, "head_size"), rows.head_size, other, expected.head_size);
}

void check_same_heads(const char* argument, const RowsView& rows, const char* other,
                      const PagedView& expected) {
  check_equal(member(argument, "heads"), rows.heads, other, expected.num_heads);
  check_equal(member(argument, "head_size"), rows.head_size, other, expected.head_size);
}

void check_same_blocks(const char* argument, const PagedView& blocks, const char* other,
                       const PagedView& expected) {
  check_equal(member(argument, "num_heads"), blocks.num_heads, other, expected.num_heads);
  check_equal(member(argument, "block_size"), blocks.block_size, other, expected.block_size);
  check_equal(member(argument, "head_size"), blocks.head_size, other, expected.head_size);
  check_same_dtype(argument, blocks.dtype, other, expected.dtype);
}

void check_slots(const int64_t* slots, int64_t count, const PagedView& blocks, Padding padding) {
  check_not_null("slots", slots, count);
  const int64_t limit = blocks.num_blocks * blocks.block_size;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] >= 0 && slots[i] < limit) continue;
    if (slots[i] == kPaddingSlot && padding == Padding::allowed) continue;
    refuse(element("slots", i), slots[i], "in [0, " + std::to_string(limit) + ")");
  }
}

void check_indices(const char* argument, const int64_t* indices, int64_t count, int64_t limit) {
  check_not_null(argument, indices, count);
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] >= 0 && indices[i] < limit) continue;
    refuse(element(argument, i), indices[i], "in [0, " + std::to_string(limit) + ")");
  }
}

int64_t check_segment_starts(const int64_t* segment_starts, int64_t num_segments) {
  check_at_least("num_segments", num_segments, 0);
  if (num_segments == 0) return 0;
  check_not_null("segment_starts", segment_starts, num_segments + 1);
  if (segment_starts[0] != 0) refuse("segment_starts[0]", segment_starts[0], "0");
  for (int64_t i = 1; i <= num_segments; ++i) {
    if (segment_starts[i] >= segment_starts[i - 1]) continue;
    refuse(element("segment_starts", i), segment_starts[i],
           "at least the start before it, " + std::to_string(segment_starts[i - 1]));
  }
  return segment_starts[num_segments];
}

void check_rotary_dim(const char* argument, int64_t rotary_dim, int64_t head_size) {
  if (rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= head_size) return;
  refuse(argument, rotary_dim, "even and in [2, head_size = " + std::to_string(head_size) + "]");
}

void check_rope(const RopeView& rope, int64_t head_size) {
  check_rotary_dim("rope.rotary_dim", rope.rotary_dim, head_size);
  check_not_null("rope.frequencies", rope.frequencies, rope.rotary_dim / 2);
  for (int64_t i = 0; i < rope.rotary_dim / 2; ++i) {
    const double frequency = rope.frequencies[i];
    if (std::isfinite(frequency) && std::fabs(frequency) <= kMaxFrequency) continue;
    refuse(element("rope.frequencies", i), std::to_string(frequency),
           "finite and at most 4 radians per position");
  }
}

void check_deltas(const char* argument, const int64_t* deltas, int64_t count) {
  check_not_null(argument, deltas, count);
  for (int64_t i = 0; i < count; ++i) {
    if (deltas[i] >= -kMaxDelta && deltas[i] <= kMaxDelta) continue;
    refuse(element(argument, i), deltas[i], "at most " + std::to_string(kMaxDelta) + " either way");
  }
}

}  // namespace phasekv
