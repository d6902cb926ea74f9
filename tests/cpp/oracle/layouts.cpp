#include "oracle/layouts.h"

namespace phasekv::oracle {

Layout layout_named(const std::string& name) {
  if (name == "rows") return Layout::rows;
  return name == "amx" ? Layout::amx : Layout::vec;
}

int64_t offset_in_head(Layout layout, Half half, int64_t block_size, int64_t head_size,
                       int64_t token, int64_t dim) {
  const int64_t values = block_size * head_size;
  if (layout == Layout::rows) {
    return token * 2 * head_size + (half == Half::key ? 0 : head_size) + dim;
  }
  if (layout == Layout::amx) {
    if (half == Half::key) {
      return (token / 16) * (16 * head_size) + (dim / 2) * 32 + (token % 16) * 2 + dim % 2;
    }
    return values + (dim / 16) * (block_size * 16) + (token / 2) * 32 + (dim % 16) * 2 + token % 2;
  }
  if (half == Half::key) return dim * block_size + token;
  return values + token * head_size + dim;
}

}  // namespace phasekv::oracle
