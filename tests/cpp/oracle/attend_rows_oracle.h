// What attend_rows must compute, in double precision and plain loops, over keys and values that lie
// in no layout at all.
#pragma once

#include <cstdint>
#include <vector>

namespace phasekv::oracle {

// Keys and values of one request.
struct DenseKV {
  int64_t num_heads = 0;
  int64_t head_size = 0;
  std::vector<double> keys;  // [tokens][num_heads][head_size]
  std::vector<double> values;
};

// softmax(scale * q k) v over the keys [0, limit) of one KV head; zeros if there are none.
// `query` has head_size elements, and so has the result. *most is the largest |scale * q k|.
std::vector<double> attend(const DenseKV& kv, int64_t kv_head, const double* query, double scale,
                           int64_t limit, double* most);

}  // namespace phasekv::oracle
