// The strides of each named layout against the engines' own formulas.
#include "phasekv/layout.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "oracle/layouts.h"
#include "phasekv/error.h"

namespace phasekv {
namespace {

using oracle::Half;

int64_t offset_of(const PagedView& view, const void* cache, int64_t token, int64_t dim) {
  const int64_t bytes = static_cast<char*>(view.data) - static_cast<const char*>(cache);
  return bytes / size_of(view.dtype) + view.token.offset(token) + view.dim.offset(dim);
}

TEST(Layout, EveryElementHasItsPlace) {
  struct Named {
    const char* name;
    DataType dtype;
  };
  std::vector<char> cache(1 << 18);
  for (const Named& named : {Named{"vec", DataType::float32}, Named{"vec16", DataType::float16},
                             Named{"amx", DataType::bfloat16}}) {
    for (const int64_t block_size : {32, 64, 128}) {
      for (const int64_t head_size : {32, 64, 96, 128, 256}) {
        const int64_t per_head = 2 * block_size * head_size;
        const PagedKV kv = cpu_paged_kv(named.name, cache.data(), named.dtype, 1, 1, block_size,
                                        head_size, per_head, per_head);
        const oracle::Layout layout = oracle::layout_named(named.name);
        std::set<int64_t> places;
        for (const Half half : {Half::key, Half::value}) {
          const PagedView& view = half == Half::key ? kv.key : kv.value;
          for (int64_t token = 0; token < block_size; ++token) {
            for (int64_t dim = 0; dim < head_size; ++dim) {
              const int64_t offset = offset_of(view, cache.data(), token, dim);
              places.insert(offset);
              ASSERT_EQ(offset,
                        oracle::offset_in_head(layout, half, block_size, head_size, token, dim))
                  << named.name << " token " << token << " dim " << dim;
            }
          }
        }
        // Each place once, and no gap.
        EXPECT_EQ(static_cast<int64_t>(places.size()), per_head);
        EXPECT_EQ(*places.begin(), 0);
        EXPECT_EQ(*places.rbegin(), per_head - 1);
      }
    }
  }
}

struct Refusal {
  const char* argument;
  const char* value;
  const char* layout;
  DataType dtype;
  int64_t block_size;
  int64_t head_size;
  int64_t block_stride;
  int64_t head_stride;
};

TEST(Layout, RefusesWhatCannotBe) {
  constexpr DataType kFloat = DataType::float32;
  constexpr DataType kBFloat = DataType::bfloat16;
  float element = 0;
  for (const Refusal& refusal : {
           Refusal{"layout", "neon", "neon", kFloat, 32, 32, 8192, 2048},
           Refusal{"layout", "", "", kFloat, 32, 32, 8192, 2048},
           Refusal{"kv_cache.dtype", "float32", "amx", kFloat, 32, 32, 8192, 2048},
           Refusal{"block_size", "16", "amx", kBFloat, 16, 32, 8192, 2048},
           Refusal{"head_size", "80", "amx", kBFloat, 32, 80, 65536, 8192},
           Refusal{"kv_cache.block_size", "0", "vec", kFloat, 0, 32, 8192, 2048},
           Refusal{"kv_cache.head_size", "-1", "vec", kFloat, 32, -1, 8192, 2048},
           Refusal{"head_stride", "2047", "vec", kFloat, 32, 32, 8192, 2047},
           Refusal{"block_stride", "0", "vec", kFloat, 32, 32, 0, 2048},
       }) {
    try {
      cpu_paged_kv(refusal.layout, &element, refusal.dtype, 4, 2, refusal.block_size,
                   refusal.head_size, refusal.block_stride, refusal.head_stride);
      ADD_FAILURE() << refusal.argument << " = " << refusal.value << " was not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), refusal.argument);
      EXPECT_EQ(error.value(), refusal.value);
      const bool is_unknown = std::string(refusal.argument) == "layout";
      EXPECT_EQ(error.code(), is_unknown ? ErrorCode::unsupported : ErrorCode::invalid_argument);
    }
  }
}

}  // namespace
}  // namespace phasekv
