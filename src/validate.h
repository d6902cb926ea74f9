// The checks every op makes of its arguments before anything is written. All of them throw Error
// with the argument's name and value.
#pragma once

#include <cstdint>
#include <string>

#include "phasekv/error.h"
#include "phasekv/rope.h"
#include "phasekv/tensor.h"

namespace phasekv {

// Rotations are exact to float32 for deltas up to this, either way (src/cpu/rotation.h).
inline constexpr int64_t kMaxDelta = int64_t{1} << 24;

std::string name_of(DataType dtype);

[[noreturn]] void refuse(const std::string& argument, const std::string& value,
                         const std::string& reason);
[[noreturn]] void refuse(const std::string& argument, int64_t value, const std::string& reason);

// A list of `count` entries; it may be null where there are none.
void check_not_null(const char* argument, const void* list, int64_t count);

// `rows` as an input. As an output its rows must also not overlap.
void check_rows(const char* argument, const RowsView& rows);
void check_output_rows(const char* argument, const RowsView& rows);

void check_blocks(const char* argument, const PagedView& blocks);

// Sizes of `argument` against what another argument says they must be.
void check_equal(const std::string& argument, int64_t value, const std::string& other,
                 int64_t expected);
void check_same_dtype(const std::string& argument, DataType dtype, const std::string& other,
                      DataType expected);

// heads and head_size of the two.
void check_same_heads(const char* argument, const RowsView& rows, const char* other,
                      const RowsView& expected);
void check_same_heads(const char* argument, const RowsView& rows, const char* other,
                      const PagedView& expected);

// Values in blocks as their keys are: KV heads, block size, head size and dtype.
void check_same_blocks(const char* argument, const PagedView& blocks, const char* other,
                       const PagedView& expected);

enum class Padding { refused, allowed };

// Slots in [0, num_blocks * block_size), or kPaddingSlot where it is allowed.
void check_slots(const int64_t* slots, int64_t count, const PagedView& blocks, Padding padding);

// indices[i] in [0, limit).
void check_indices(const char* argument, const int64_t* indices, int64_t count, int64_t limit);

// [num_segments + 1], starts at 0, non-decreasing. Returns the last.
int64_t check_segment_starts(const int64_t* segment_starts, int64_t num_segments);

// Rotated dimensions of a head.
void check_rotary_dim(const char* argument, int64_t rotary_dim, int64_t head_size);
void check_rope(const RopeView& rope, int64_t head_size);
void check_deltas(const char* argument, const int64_t* deltas, int64_t count);

}  // namespace phasekv
