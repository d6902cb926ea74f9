#include "cases.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>

namespace phasekv {

namespace {

struct Storage {
  const char* layout;
  DataType dtype;
  DataType other_dtype;
};

constexpr Storage kStorages[] = {
    {"vec", DataType::float32, DataType::float32},
    {"vec", DataType::bfloat16, DataType::bfloat16},
    {"vec16", DataType::float16, DataType::float32},
    {"vec16", DataType::float32, DataType::bfloat16},
    {"amx", DataType::bfloat16, DataType::float16},
    {"rows", DataType::float32, DataType::float16},
    {"rows", DataType::float16, DataType::bfloat16},
};
constexpr int64_t kHeadSizes[] = {32, 40, 64, 80, 96, 112, 128, 192, 256};
constexpr int64_t kWideHeadSizes[] = {300, 576, 1056};
constexpr int64_t kBlockSizes[] = {16, 32, 64, 128};
constexpr int64_t kHeads[] = {1, 2, 3, 8};
constexpr double kRotaryShares[] = {1.0, 0.25, 0.5, 0.75};

template <typename T, size_t N>
T pick(const T (&list)[N], size_t index) {
  return list[index % N];
}

// The other dimensions of a case turn with three counters, each at its own pace, so that every pair
// of values of two dimensions meets.
Case make_case(int64_t head_size, size_t layout_index, size_t size_index, size_t count_index) {
  const Storage& storage = kStorages[layout_index];
  Case shape;
  shape.seed = static_cast<uint32_t>(layout_index * 1000 + size_index * 10 + count_index);
  shape.layout = storage.layout;
  shape.dtype = storage.dtype;
  shape.other_dtype = storage.other_dtype;
  shape.head_size = head_size;
  shape.block_size = pick(kBlockSizes, layout_index + size_index + count_index);
  if (shape.layout == "amx") shape.block_size = std::max<int64_t>(shape.block_size, 32);
  shape.heads = pick(kHeads, layout_index + 2 * size_index + 3 * count_index);
  const double share = pick(kRotaryShares, size_index + count_index);
  shape.rotary_dim = static_cast<int64_t>(share * static_cast<double>(shape.head_size)) / 2 * 2;
  shape.pairing =
      (layout_index + count_index) % 2 == 0 ? RopePairing::neox : RopePairing::interleaved;
  shape.rows_order = static_cast<RowsOrder>((layout_index + size_index + 2 * count_index) % 3);
  shape.slot_order = static_cast<SlotOrder>((layout_index + 2 * size_index + count_index) % 3);
  const int64_t counts[] = {
      0, 1, 2, shape.block_size - 1, shape.block_size, 300, 2062, shape.block_size + 1};
  shape.tokens = counts[count_index];
  // The long ones once each, and narrow: their length is the point.
  if (shape.tokens >= 300) shape.heads = std::min<int64_t>(shape.heads, 2);
  if (shape.tokens == 2062 && (size_index + layout_index) % 3 != 0) shape.tokens = 17;
  return shape;
}

// Of every layout, head size and number of tokens.
template <size_t kSizes, size_t kCounts>
std::vector<Case> make_cases(const int64_t (&head_sizes)[kSizes], const size_t (&counts)[kCounts]) {
  std::vector<Case> cases;
  for (size_t layout = 0; layout < std::size(kStorages); ++layout) {
    for (size_t size = 0; size < kSizes; ++size) {
      const bool is_amx = kStorages[layout].layout == std::string("amx");
      if (is_amx && head_sizes[size] % 32 != 0) continue;  // layout_test sees it refused
      for (const size_t count : counts) {
        cases.push_back(make_case(head_sizes[size], layout, size, count));
      }
    }
  }
  return cases;
}

std::vector<Case> make_cases_of_any_width() {
  std::vector<Case> cases = all_cases();
  for (const Case& shape : make_cases(kWideHeadSizes, {1, 3})) cases.push_back(shape);
  return cases;
}

}  // namespace

std::vector<int64_t> Case::slots_without_padding() const {
  std::mt19937 generator(seed);
  if (slot_order == SlotOrder::scattered) {
    std::vector<int64_t> all(static_cast<size_t>(num_blocks() * block_size));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), generator);
    all.resize(static_cast<size_t>(tokens));
    return all;
  }
  std::vector<int64_t> blocks(static_cast<size_t>(num_blocks()));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), generator);
  std::vector<int64_t> slots;
  for (int64_t position = kFirstOffset; position < kFirstOffset + tokens; ++position) {
    const int64_t block = blocks[static_cast<size_t>(position / block_size)];
    slots.push_back(block * block_size + position % block_size);
  }
  return slots;
}

std::vector<int64_t> Case::slots() const {
  std::vector<int64_t> slots = slots_without_padding();
  if (slot_order != SlotOrder::padded) return slots;
  for (size_t i = 3; i < slots.size(); i += 7) slots[i] = kPaddingSlot;
  return slots;
}

std::vector<int64_t> Case::segment_starts() const {
  std::vector<int64_t> starts = {0, 0};
  int64_t length = 1;
  while (starts.back() < tokens) {
    starts.push_back(std::min(tokens, starts.back() + length));
    length = length * 3 + 1;
  }
  starts.push_back(tokens);
  return starts;
}

std::vector<double> Case::frequencies() const {
  RopeConfig config;
  config.theta = seed % 2 == 0 ? 10000.0 : 1e6;
  config.rotary_dim = rotary_dim;
  config.type = std::array{"default", "linear", "llama3", "yarn"}[seed % 4];
  config.factor = config.type == "default" ? 1.0 : 8.0;
  return rope_frequencies(config);
}

std::vector<int64_t> Case::deltas(int64_t count) const {
  constexpr int64_t kSome[] = {0, 1, -1, 131071, -131071, 200, -77, 4096, 54321, -100000};
  std::vector<int64_t> deltas;
  for (int64_t i = 0; i < count; ++i) {
    deltas.push_back(pick(kSome, static_cast<size_t>(i) + seed));
  }
  return deltas;
}

std::vector<int64_t> Case::rows(int64_t count, int64_t limit) const {
  std::mt19937 generator(seed + 1);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < count; ++i) {
    rows.push_back(static_cast<int64_t>(generator()) % limit);
  }
  return rows;
}

std::ostream& operator<<(std::ostream& stream, const Case& shape) {
  constexpr const char* kTypes[] = {"float32", "bfloat16", "float16"};
  return stream << "case " << shape.seed << ": " << shape.layout << " "
                << kTypes[static_cast<int>(shape.dtype)] << ", other rows "
                << kTypes[static_cast<int>(shape.other_dtype)] << ", tokens " << shape.tokens
                << ", heads " << shape.heads << ", head_size " << shape.head_size << ", block_size "
                << shape.block_size << ", rotary_dim " << shape.rotary_dim
                << (shape.pairing == RopePairing::neox ? " neox" : " interleaved")
                << ", rows order " << static_cast<int>(shape.rows_order) << ", slot order "
                << static_cast<int>(shape.slot_order);
}

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = make_cases(kHeadSizes, {0, 1, 2, 3, 4, 5, 6, 7});
  return cases;
}

const std::vector<Case>& cases_of_any_width() {
  static const std::vector<Case> cases = make_cases_of_any_width();
  return cases;
}

}  // namespace phasekv
