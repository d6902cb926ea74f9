// Copies a matrix into its transpose: what lies between rows, whose dimensions are adjacent, and
// blocks whose tokens are.
//
// Bound: memcpy of as many bytes. A square of a line of rows by eight columns is transposed in
// registers, and leaves as whole lines. What the next matrix is made of is fetched meanwhile.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/lines.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {

template <typename T>
struct TransposedMove {
  const T* from;  // [rows], from_stride apart, of `columns` adjacent elements
  int64_t from_stride;
  int64_t rows;
  int64_t columns;
  T* to;  // [columns], to_stride apart, of `rows` adjacent elements
  int64_t to_stride;
  const void* next;     // rows of the matrix that comes next, about as large, or null
  int64_t next_stride;  // in bytes
  bool streams;         // whole lines go past the caches; then end_of_streams() is owed
};

template <typename T>
class TransposedMover {
 public:
  explicit TransposedMover(const TransposedMove<T>& move)
      : move_(move),
        first_row_(rows_before_line(move)),
        end_row_(first_row_ + (move.rows - first_row_) / kLine<T> * kLine<T>),
        end_column_(move.columns / kSquareColumns * kSquareColumns) {}

  void run() const {
    move_rest(0, first_row_, 0, move_.columns);
    if (move_.streams && move_.to_stride % kLine<T> == 0) {
      move_squares<true>();
    } else {
      move_squares<false>();
    }
    move_rest(end_row_, move_.rows, 0, move_.columns);
    move_rest(first_row_, end_row_, end_column_, move_.columns);
  }

 private:
  // Squares that read from the same lines. Each fetches as many of those that come next.
  static constexpr int64_t kSharers = kLine<T> / kSquareColumns;
  static constexpr int64_t kFetches = kLine<T> / kSharers;

  static int64_t rows_before_line(const TransposedMove<T>& move) {
    const auto address = reinterpret_cast<uintptr_t>(move.to);
    const auto past = static_cast<int64_t>(address / sizeof(T)) % kLine<T>;
    const int64_t before = past == 0 ? 0 : kLine<T> - past;
    return before < move.rows ? before : move.rows;
  }

  template <bool kStreams>
  void move_squares() const {
    for (int64_t column = 0; column < end_column_; column += kSquareColumns) {
      for (int64_t row = first_row_; row < end_row_; row += kLine<T>) {
        if (move_.next != nullptr) fetch_next(row, column);
        move_square<kStreams>(row, column);
      }
    }
  }

  // This sharer's part of the lines that the same square of the next matrix lies in.
  void fetch_next(int64_t row, int64_t column) const {
    const int64_t first = row + column / kSquareColumns % kSharers * kFetches;
    const char* line = static_cast<const char*>(move_.next) + first * move_.next_stride +
                       column / kLine<T> * kLine<char>;
    for (int64_t i = 0; i < kFetches; ++i) prefetch(line + i * move_.next_stride);
  }

  template <bool kStreams>
  void move_square(int64_t row, int64_t column) const {
    const HalfLines<T> first = load_transposed(element(row, column), move_.from_stride);
    const HalfLines<T> second =
        load_transposed(element(row + kHalfLine<T>, column), move_.from_stride);
    for (int64_t i = 0; i < kSquareColumns; ++i) {
      T* to = target(row, column + i);
      if constexpr (kStreams) {
        first.stream(i, to);
        second.stream(i, to + kHalfLine<T>);
      } else {
        first.store(i, to);
        second.store(i, to + kHalfLine<T>);
      }
    }
  }

  // Rows and columns that make no whole square.
  void move_rest(int64_t row, int64_t end_row, int64_t column, int64_t end_column) const {
    for (; row + kHalfLine<T> <= end_row; row += kHalfLine<T>) {
      int64_t c = column;
      for (; c + kSquareColumns <= end_column; c += kSquareColumns) {
        const HalfLines<T> lines = load_transposed(element(row, c), move_.from_stride);
        for (int64_t i = 0; i < kSquareColumns; ++i) lines.store(i, target(row, c + i));
      }
      move_elements(row, row + kHalfLine<T>, c, end_column);
    }
    move_elements(row, end_row, column, end_column);
  }

  void move_elements(int64_t row, int64_t end_row, int64_t column, int64_t end_column) const {
    for (int64_t c = column; c < end_column; ++c) {
      for (int64_t r = row; r < end_row; ++r) *target(r, c) = *element(r, c);
    }
  }

  const T* element(int64_t row, int64_t column) const {
    return move_.from + row * move_.from_stride + column;
  }
  T* target(int64_t row, int64_t column) const { return move_.to + column * move_.to_stride + row; }

  const TransposedMove<T>& move_;
  int64_t first_row_;  // squares cover the rows [first_row_, end_row_)
  int64_t end_row_;
  int64_t end_column_;  // and the columns [0, end_column_)
};

template <typename T>
inline void move_transposed(const TransposedMove<T>& move) {
  TransposedMover<T>(move).run();
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
