#include "phasekv/ops/rotate_keys.h"

#include "dispatch.h"
#include "validate.h"

namespace phasekv {

void rotate_keys(const RotateKeysParams& params) {
  check_rows("keys", params.keys);
  check_output_rows("out", params.out);
  check_equal("out.tokens", params.out.tokens, "keys", params.keys.tokens);
  check_same_heads("out", params.out, "keys", params.keys);
  check_same_dtype("out", params.out.dtype, "keys", params.keys.dtype);
  check_rope(params.rope, params.keys.head_size);
  check_deltas("deltas", params.deltas, params.keys.tokens);
  if (params.keys.tokens > 0) active_kernels().rotate_keys(params);
}

}  // namespace phasekv
