// What the benchmarks of the ops measure, and how: an op and what bounds it, turn by turn.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "phasekv/tensor.h"

namespace phasekv::benchmarks {

struct Shape {
  int64_t tokens = 0;
  int64_t kept = 0;     // survivors of an eviction; 0 where nothing is evicted
  int64_t queries = 0;  // 0 where there are none
  int64_t kv_heads = 0;
  int64_t group = 0;  // query heads of a KV head; 0 where there are none
  int64_t head_size = 0;
  int64_t block_size = 0;
  DataType dtype = DataType::float32;
};

enum class Bound {
  memcpy,        // of as many bytes, of which it reads the one half and writes the other
  dot_products,  // float32, whose operands are in the closest cache
};

// An op at work on some shape.
struct Op {
  std::string name;
  // What is adjacent in its blocks, or what a group is along, "dimensions" or "tokens"; else "".
  std::string adjacent;
  Bound bound = Bound::memcpy;
  double work = 0.0;        // bytes read and bytes written, each once, or FLOP
  double line_bytes = 0.0;  // of the cache lines that hold those bytes, where that is more
  std::function<void()> run;
};

// Memory for one op: many layers, so that nothing is in a cache from the call before.
class Workload {
 public:
  virtual ~Workload() = default;
  virtual const Shape& shape() const = 0;
  virtual std::vector<Op> ops() = 0;
  // What the ops work on from now on is another layer.
  virtual void next_layer() = 0;
  // memcpy by as many threads as an op may use, within the layer.
  virtual void copy(int64_t bytes) = 0;
};

struct Result {
  Shape shape;
  std::string op;
  std::string adjacent;
  Bound bound;
  double work;
  double line_bytes;
  double milliseconds;   // median
  double percentile_10;  // milliseconds
  double percentile_90;
  double rate;        // 1e9 bytes or FLOP a second
  double bound_rate;  // the same of the bound

  double share() const { return rate / bound_rate; }
  // Of what memcpy would need for all of the lines.
  double line_share() const { return share() * line_bytes / work; }
};

// Op and bound take turns for about so long, at least eleven times.
Result compare(const Op& op, double seconds, Workload& workload);

}  // namespace phasekv::benchmarks
