// compact: the moves of a KV head into one block are made together, and where the tokens of a
// dimension are adjacent, dimension after dimension, so that the lines they share are fetched once.
//
// Bound: what a line of 64 bytes costs to read and to write for each that holds a moved element. A
// token's dimensions fill whole lines where they are adjacent; transposed, a lone token touches a
// line for each dimension.
#include "phasekv/ops/compact.h"

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/tile.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// Moves of one KV head into one block, at most so many at a time.
constexpr int64_t kMostMoves = 128;

struct Moves {
  const int64_t* from;  // indices in the request
  const int64_t* to;
  int64_t count;
};

template <typename T>
class Mover {
 public:
  Mover(const CompactParams& params, const PagedView& blocks)
      : params_(params), blocks_(blocks), arrangement_(arrangement_of(blocks)) {}

  void run(int64_t head, const Moves& moves) {
    for (int64_t i = 0; i < moves.count; ++i) {
      from_[i] = place_of(head, moves.from[i]);
      to_[i] = place_of(head, moves.to[i]);
    }
    if (arrangement_ == Arrangement::dim_contiguous) {
      for (int64_t i = 0; i < moves.count; ++i) copy_row(from_[i], blocks_.head_size, to_[i]);
      return;
    }
    for_each_dim(blocks_.dim, blocks_.head_size, [&](int64_t /*d*/, int64_t offset) {
      for (int64_t i = 0; i < moves.count; ++i) to_[i][offset] = from_[i][offset];
    });
  }

 private:
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
};

template <typename T>
void move_all(const CompactParams& params, Range moves) {
  Mover<T> keys(params, params.key);
  Mover<T> values(params, params.value);
  const int64_t block_size = params.key.block_size;
  int64_t head = 0;
  for (int64_t at = moves.begin; at < moves.end;) {
    while (params.starts[head + 1] <= at) ++head;
    int64_t end = params.starts[head + 1] < moves.end ? params.starts[head + 1] : moves.end;
    if (end > at + kMostMoves) end = at + kMostMoves;
    const int64_t block = (params.first_token + params.to[at]) / block_size;
    int64_t count = 1;
    while (at + count < end && (params.first_token + params.to[at + count]) / block_size == block) {
      ++count;
    }
    const Moves together{params.from + at, params.to + at, count};
    keys.run(head, together);
    values.run(head, together);
    at += count;
  }
}

}  // namespace

void compact(const CompactParams& params) {
  with_bits_type(params.key.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const int64_t moves = params.starts[params.key.num_heads];
    const int64_t bytes = 4 * moves * params.key.head_size * int64_t{sizeof(T)};
#pragma omp parallel num_threads(threads_for(bytes))
    move_all<T>(params, share_of_thread(moves));
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
