// What the bindings of the ops over a request's keys share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "op_call.h"
#include "phasekv/tensor.h"

namespace phasekv::bindings {

// The block ids of one request, int32 [blocks], which must reach as far as index `end` - 1 of the
// request.
const int32_t* request_blocks(const pybind11::handle& block_table, const PagedView& blocks,
                              int64_t end, OpCall* call = nullptr);

// Original positions of the keys, int32 [KV heads, tokens]; null for None.
const int32_t* key_positions(const pybind11::handle& positions, const PagedView& key,
                             int64_t tokens, OpCall& call);

// first_token + tokens, where both can be.
int64_t end_of_keys(int64_t first_token, int64_t tokens);

}  // namespace phasekv::bindings
