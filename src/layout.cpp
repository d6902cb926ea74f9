#include "phasekv/layout.h"

#include <string>

#include "validate.h"

namespace phasekv {

namespace {

constexpr int64_t kAmxTileRows = 16;  // rows of a tile register
constexpr int64_t kAmxPair = 2;       // bfloat16 elements in 32 bits
constexpr int64_t kAmxMultiple = 32;

void check_multiple(const char* argument, int64_t value, int64_t of) {
  if (value % of != 0) refuse(argument, value, "a multiple of " + std::to_string(of));
}

void check_stride(const char* argument, int64_t stride, int64_t least, bool matters) {
  if (matters && stride < least) {
    refuse(argument, stride, "at least 2 * block_size * head_size = " + std::to_string(least));
  }
}

void set_transposed_axes(PagedKV& kv, int64_t block_size, int64_t head_size) {
  kv.key.token = {.outer_stride = 1};
  kv.key.dim = {.outer_stride = block_size};
  kv.value.token = {.outer_stride = head_size};
  kv.value.dim = {.outer_stride = 1};
}

// Two elements that the tile unit multiplies together lie side by side: two dimensions of a key,
// two tokens of a value.
void set_amx_axes(PagedKV& kv, int64_t block_size, int64_t head_size) {
  kv.key.token = {
      .tile = kAmxTileRows, .outer_stride = kAmxTileRows * head_size, .inner_stride = kAmxPair};
  kv.key.dim = {.tile = kAmxPair, .outer_stride = kAmxTileRows * kAmxPair, .inner_stride = 1};
  kv.value.token = {.tile = kAmxPair, .outer_stride = kAmxTileRows * kAmxPair, .inner_stride = 1};
  kv.value.dim = {
      .tile = kAmxTileRows, .outer_stride = block_size * kAmxTileRows, .inner_stride = kAmxPair};
}

}  // namespace

PagedKV cpu_paged_kv(std::string_view name, void* data, DataType dtype, int64_t num_blocks,
                     int64_t num_kv_heads, int64_t block_size, int64_t head_size,
                     int64_t block_stride, int64_t head_stride) {
  PagedKV kv;
  kv.key = {.data = data,
            .dtype = dtype,
            .num_blocks = num_blocks,
            .num_heads = num_kv_heads,
            .block_size = block_size,
            .head_size = head_size,
            .block_stride = block_stride,
            .head_stride = head_stride,
            .token = {},
            .dim = {}};
  check_blocks("kv_cache", kv.key);
  const int64_t half = block_size * head_size;
  check_stride("block_stride", block_stride, 2 * half, num_blocks > 1);
  check_stride("head_stride", head_stride, 2 * half, num_kv_heads > 1);

  kv.value = kv.key;
  if (data != nullptr) kv.value.data = static_cast<char*>(data) + half * size_of(dtype);
  if (name == "vec" || name == "vec16") {
    set_transposed_axes(kv, block_size, head_size);
  } else if (name == "amx") {
    if (dtype != DataType::bfloat16) {
      refuse("kv_cache.dtype", name_of(dtype), "bfloat16 for the layout amx");
    }
    check_multiple("block_size", block_size, kAmxMultiple);
    check_multiple("head_size", head_size, kAmxMultiple);
    set_amx_axes(kv, block_size, head_size);
  } else {
    throw Error(ErrorCode::unsupported, "layout", std::string(name), "one of vec, vec16, amx");
  }
  return kv;
}

}  // namespace phasekv
