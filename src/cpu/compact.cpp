// compact: the moves of a KV head into one block are made together, and where the tokens of a
// dimension are adjacent, dimension after dimension, so that the lines they share are fetched once.
// What comes next is fetched meanwhile: survivors lie anywhere, and no processor guesses where.
//
// Bound: what a line of 64 bytes costs to read and to write for each that holds a moved element. A
// token's dimensions fill whole lines where they are adjacent; transposed, a lone token touches a
// line for each dimension.
#include "phasekv/ops/compact.h"

#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Moves the keys, or the values, of the moves that one thread was given.
template <typename T>
class Mover {
 public:
  Mover(const CompactParams& params, const PagedView& blocks)
      : params_(params), blocks_(blocks), arrangement_(arrangement_of(blocks)) {}

  void run(Range moves) {
    int64_t head = 0;
    for (int64_t at = moves.begin; at < moves.end;) {
      while (params_.starts[head + 1] <= at) ++head;
      const int64_t end =
          params_.starts[head + 1] < moves.end ? params_.starts[head + 1] : moves.end;
      const int64_t count = moves_together(at, end);
      for (int64_t i = 0; i < count; ++i) {
        from_[i] = place_of(head, params_.from[at + i]);
        to_[i] = place_of(head, params_.to[at + i]);
      }
      if (arrangement_ == Arrangement::dim_contiguous) {
        move_rows(count);
      } else {
        move_dimensions(count);
      }
      at += count;
    }
  }

 private:
  static constexpr int64_t kMostMoves = 128;
  static constexpr int64_t kRowsAhead = 8;
  static constexpr int64_t kDimensionsAhead = 4;

  // How many of the moves [at, end) of a KV head, the first at least.
  int64_t moves_together(int64_t at, int64_t end) const {
    if (end > at + kMostMoves) end = at + kMostMoves;
    if (arrangement_ == Arrangement::dim_contiguous) return end - at;
    int64_t next = at + 1;
    while (next < end && block_of(params_.to[next]) == block_of(params_.to[at])) ++next;
    return next - at;
  }

  void move_rows(int64_t count) const {
    for (int64_t i = 0; i < count && i < kRowsAhead; ++i) fetch_rows(i);
    for (int64_t i = 0; i < count; ++i) {
      if (i + kRowsAhead < count) fetch_rows(i + kRowsAhead);
      copy_row(from_[i], blocks_.head_size, to_[i]);
    }
  }

  void fetch_rows(int64_t i) const {
    for (int64_t d = 0; d < blocks_.head_size; d += kLine<T>) {
      prefetch(from_[i] + d);
      prefetch_for_write(to_[i] + d);
    }
  }

  void move_dimensions(int64_t count) {
    const int64_t lines = find_lines(count);
    for_each_dim(blocks_.dim, blocks_.head_size, [&](int64_t d, int64_t offset) {
      const int64_t ahead = d + kDimensionsAhead;
      if (ahead < blocks_.head_size) {
        const int64_t coming = offset_on(blocks_.dim, ahead);
        for (int64_t i = 0; i < lines; ++i) prefetch(lines_[i] + coming);
      }
      for (int64_t i = 0; i < count; ++i) to_[i][offset] = from_[i][offset];
    });
  }

  // An element in each of the lines that the moves touch, most of them once.
  int64_t find_lines(int64_t count) {
    int64_t lines = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (i == 0 || line_of(from_[i]) != line_of(from_[i - 1])) lines_[lines++] = from_[i];
      if (i == 0 || line_of(to_[i]) != line_of(to_[i - 1])) lines_[lines++] = to_[i];
    }
    return lines;
  }

  static uintptr_t line_of(const T* p) {
    return reinterpret_cast<uintptr_t>(p) / static_cast<uintptr_t>(kLine<char>);
  }

  int64_t block_of(int64_t index) const {
    return (params_.first_token + index) / blocks_.block_size;
  }

  T* place_of(int64_t head, int64_t index) const {
    const int64_t token = params_.first_token + index;
    const int64_t block = params_.block_table[token / blocks_.block_size];
    return head_of_block<T>(blocks_, block, head) +
           offset_on(blocks_.token, token % blocks_.block_size);
  }

  const CompactParams& params_;
  const PagedView& blocks_;
  Arrangement arrangement_;
  T* from_[kMostMoves];
  T* to_[kMostMoves];
  const T* lines_[2 * kMostMoves];
};

}  // namespace

void compact(const CompactParams& params) {
  with_bits_type(params.key.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const int64_t moves = params.starts[params.key.num_heads];
    const int64_t bytes = 4 * moves * params.key.head_size * int64_t{sizeof(T)};
#pragma omp parallel num_threads(threads_for(bytes))
    {
      const Range range = share_of_thread(moves);
      Mover<T>(params, params.key).run(range);
      Mover<T>(params, params.value).run(range);
    }
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
