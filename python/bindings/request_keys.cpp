#include "request_keys.h"

#include <limits>
#include <string>

#include "phasekv/error.h"
#include "tensor_caster.h"

namespace py = pybind11;

namespace phasekv::bindings {

const int32_t* request_blocks(const py::handle& block_table, const PagedView& blocks, int64_t end,
                              OpCall* call) {
  const List<int32_t> list = int32_list("block_table", block_table, call);
  const int64_t needed = end <= 0 ? 0 : (end - 1) / blocks.block_size + 1;
  if (list.count < needed) {
    throw Error(ErrorCode::invalid_argument, "block_table", "[" + std::to_string(list.count) + "]",
                "at least [" + std::to_string(needed) + "], for " + std::to_string(end) +
                    " tokens of the request");
  }
  return list.data;
}

const int32_t* key_positions(const py::handle& positions, const PagedView& key, int64_t tokens,
                             OpCall& call) {
  if (positions.is_none()) return nullptr;
  const Tensor table =
      contiguous_tensor("positions", positions, "int32", {key.num_heads, tokens}, &call);
  return static_cast<const int32_t*>(table.data);
}

int64_t end_of_keys(int64_t first_token, int64_t tokens) {
  if (tokens < 0) {
    throw Error(ErrorCode::invalid_argument, "tokens", std::to_string(tokens), "at least 0");
  }
  const int64_t most = std::numeric_limits<int64_t>::max() - tokens;
  if (first_token < 0 || first_token > most) {
    throw Error(ErrorCode::invalid_argument, "first_token", std::to_string(first_token),
                "in [0, " + std::to_string(most) + "]");
  }
  return first_token + tokens;
}

}  // namespace phasekv::bindings
