// attend_rows against the double-precision oracle, in every layout, dtype and instruction set.
#include "phasekv/ops/attend_rows.h"

#include <gtest/gtest.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "implementations.h"
#include "oracle/attend_rows_oracle.h"
#include "phasekv/error.h"
#include "phasekv/layout.h"

namespace phasekv {
namespace {

// ---- Elements as bits, written without the library's conversions.

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A memory of elements of one dtype.
class Elements {
 public:
  Elements(DataType dtype, size_t count) : dtype_(dtype), bytes_(count * size_of(dtype)) {}

  DataType dtype() const { return dtype_; }
  void* data() { return bytes_.data(); }
  size_t size() const { return bytes_.size() / size_of(dtype_); }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  double get(int64_t i) const {
    const unsigned char* p = bytes_.data() + i * size_of(dtype_);
    if (dtype_ == DataType::float32) {
      float x;
      std::memcpy(&x, p, sizeof x);
      return x;
    }
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
    if (dtype_ == DataType::bfloat16) return from_bfloat16(half);
    _Float16 x;
    std::memcpy(&x, p, sizeof x);
    return static_cast<double>(x);
  }

  void set(int64_t i, float value) { write(bytes_.data() + i * size_of(dtype_), dtype_, value); }

  static void write(void* p, DataType dtype, float value) {
    if (dtype == DataType::float32) {
      std::memcpy(p, &value, sizeof value);
    } else if (dtype == DataType::bfloat16) {
      const uint16_t half = std::isnan(value) ? 0x7FC0 : to_bfloat16(value);
      std::memcpy(p, &half, sizeof half);
    } else {
      const auto half = static_cast<_Float16>(value);
      std::memcpy(p, &half, sizeof half);
    }
  }

  void fill(float value) {
    for (size_t i = 0; i < size(); ++i) set(static_cast<int64_t>(i), value);
  }

 private:
  DataType dtype_;
  std::vector<unsigned char> bytes_;
};

// The largest relative error of rounding to the dtype.
double rounding_of(DataType dtype) {
  if (dtype == DataType::float32) return 0x1p-24;
  return dtype == DataType::bfloat16 ? 0x1p-8 : 0x1p-11;
}

// ---- Layouts, by formula.

struct Shape {
  int64_t num_blocks = 0;
  int64_t num_heads = 0;
  int64_t block_size = 0;
  int64_t head_size = 0;
};

struct Place {
  int64_t block;
  int64_t head;
  int64_t token;
  int64_t dim;
};

struct BlockLayout {
  std::string name;
  std::function<int64_t(const Shape&)> elements;  // of the whole pool
  std::function<int64_t(const Shape&, const Place&)> key;
  std::function<int64_t(const Shape&, const Place&)> value;
  std::function<PagedKV(const Shape&, void*, DataType)> view;
};

int64_t half_block(const Shape& s) { return s.block_size * s.head_size; }
int64_t block_head(const Shape& s, const Place& p) {
  return (p.block * s.num_heads + p.head) * 2 * half_block(s);
}
int64_t dense_elements(const Shape& s) { return s.num_blocks * s.num_heads * 2 * half_block(s); }

std::function<PagedKV(const Shape&, void*, DataType)> cpu_view(const std::string& name) {
  return [name](const Shape& s, void* data, DataType dtype) {
    return cpu_paged_kv(name, data, dtype, s.num_blocks, s.num_heads, s.block_size, s.head_size,
                        s.num_heads * 2 * half_block(s), 2 * half_block(s));
  };
}

// vLLM's CPU backend: K transposed, then V.
BlockLayout vec_layout(const std::string& name = "vec") {
  return {name, dense_elements,
          [](const Shape& s, const Place& p) {
            return block_head(s, p) + p.dim * s.block_size + p.token;
          },
          [](const Shape& s, const Place& p) {
            return block_head(s, p) + half_block(s) + p.token * s.head_size + p.dim;
          },
          cpu_view(name)};
}

// The same with AMX.
BlockLayout amx_layout() {
  return {"amx", dense_elements,
          [](const Shape& s, const Place& p) {
            return block_head(s, p) + p.token / 16 * (16 * s.head_size) + p.dim / 2 * 32 +
                   p.token % 16 * 2 + p.dim % 2;
          },
          [](const Shape& s, const Place& p) {
            return block_head(s, p) + half_block(s) + p.dim / 16 * (s.block_size * 16) +
                   p.token / 2 * 32 + p.dim % 16 * 2 + p.token % 2;
          },
          cpu_view("amx")};
}

// FlashAttention's: [block][token][head][K and V side by side].
BlockLayout nhd_layout() {
  const auto at = [](const Shape& s, const Place& p) {
    return ((p.block * s.block_size + p.token) * s.num_heads + p.head) * 2 * s.head_size + p.dim;
  };
  return {"nhd", dense_elements, at,
          [at](const Shape& s, const Place& p) { return at(s, p) + s.head_size; },
          [](const Shape& s, void* data, DataType dtype) {
            PagedView key;
            key.data = data;
            key.dtype = dtype;
            key.num_blocks = s.num_blocks;
            key.num_heads = s.num_heads;
            key.block_size = s.block_size;
            key.head_size = s.head_size;
            key.block_stride = s.block_size * s.num_heads * 2 * s.head_size;
            key.head_stride = 2 * s.head_size;
            key.token.outer_stride = s.num_heads * 2 * s.head_size;
            key.dim.outer_stride = 1;
            PagedView value = key;
            value.data = static_cast<char*>(data) + s.head_size * size_of(dtype);
            return PagedKV{key, value};
          }};
}

// Keys with adjacent dimensions and values with adjacent tokens: each the other way about.
BlockLayout swapped_layout() {
  const BlockLayout vec = vec_layout();
  return {"swapped", dense_elements,
          [](const Shape& s, const Place& p) {
            return block_head(s, p) + half_block(s) + p.token * s.head_size + p.dim;
          },
          vec.key,
          [](const Shape& s, void* data, DataType dtype) {
            const PagedKV vec = vec_layout().view(s, data, dtype);
            return PagedKV{vec.value, vec.key};
          }};
}

// Nothing adjacent, and room between the blocks.
BlockLayout sparse_layout() {
  const auto at = [](const Shape& s, const Place& p, int64_t which) {
    return ((p.block * s.num_heads + p.head) * s.block_size + p.token) * (4 * s.head_size) +
           p.dim * 4 + which + p.block * 40;
  };
  return {"sparse", [](const Shape& s) { return 2 * dense_elements(s) + 40 * s.num_blocks; },
          [at](const Shape& s, const Place& p) { return at(s, p, 1); },
          [at](const Shape& s, const Place& p) { return at(s, p, 2); },
          [](const Shape& s, void* data, DataType dtype) {
            PagedKV kv = nhd_layout().view(s, data, dtype);
            const int64_t token = 4 * s.head_size;
            kv.key.block_stride = s.num_heads * s.block_size * token + 40;
            kv.key.head_stride = s.block_size * token;
            kv.key.token.outer_stride = token;
            kv.key.dim.outer_stride = 4;
            kv.value = kv.key;
            kv.key.data = static_cast<char*>(data) + size_of(dtype);
            kv.value.data = static_cast<char*>(data) + 2 * size_of(dtype);
            return kv;
          }};
}

// ---- A problem: some requests in a pool of blocks, rows over them.

struct Row {
  int32_t request;
  int64_t limit;
};

struct Options {
  DataType dtype = DataType::float32;  // of keys, values, queries and outputs
  BlockLayout layout = vec_layout();
  int64_t block_size = 32;
  int64_t head_size = 64;
  int64_t kv_heads = 2;
  int64_t group = 3;
  float scale = 0.125F;
  float query_spread = 1.0F;  // standard deviation
  unsigned seed = 1;
  unsigned block_seed = 1;  // which blocks are given to whom
};

class Problem {
 public:
  // Rows of a request must be adjacent. Everything that no row may see is NaN.
  Problem(const Options& options, std::vector<int64_t> request_tokens, std::vector<Row> rows)
      : options_(options),
        rows_(std::move(rows)),
        heads_(options.kv_heads * options.group),
        shape_(shape_for(options, request_tokens)),
        pool_(options.dtype, options.layout.elements(shape_)),
        query_(options.dtype, rows_.size() * token_stride()),
        out_(options.dtype, rows_.size() * token_stride()) {
    pool_.fill(std::numeric_limits<float>::quiet_NaN());
    query_.fill(std::numeric_limits<float>::quiet_NaN());
    out_.fill(kUntouched);
    std::mt19937 random(options.seed);
    std::normal_distribution<float> normal;

    std::vector<int32_t> free_blocks(shape_.num_blocks);
    std::iota(free_blocks.begin(), free_blocks.end(), 0);
    std::mt19937 block_random(options.block_seed);
    std::shuffle(free_blocks.begin(), free_blocks.end(), block_random);
    for (const int64_t tokens : request_tokens) {
      table_stride_ = std::max(table_stride_, ceil_div(tokens, options.block_size));
    }
    // Lines of the table are filled up with an id that would be refused if it were looked at.
    table_.assign(request_tokens.size() * table_stride_, -7);
    for (size_t request = 0; request < request_tokens.size(); ++request) {
      const int64_t tokens = request_tokens[request];
      for (int64_t b = 0; b < ceil_div(tokens, options.block_size); ++b) {
        table_[request * table_stride_ + b] = free_blocks.back();
        free_blocks.pop_back();
      }
      dense_.push_back(write_request(request, tokens, random, normal));
    }
    for (size_t row = 0; row < rows_.size(); ++row) {
      requests_.push_back(rows_[row].request);
      limits_.push_back(rows_[row].limit);
      for (int64_t head = 0; head < heads_; ++head) {
        for (int64_t d = 0; d < options.head_size; ++d) {
          query_.set(row * token_stride() + head * head_stride() + d,
                     options.query_spread * normal(random));
        }
      }
    }
  }

  AttendRowsParams params() {
    const PagedKV kv = options_.layout.view(shape_, pool_.data(), options_.dtype);
    AttendRowsParams params;
    params.query = rows_view(query_);
    params.key = kv.key;
    params.value = kv.value;
    params.block_table = table_.data();
    params.num_requests = static_cast<int64_t>(dense_.size());
    params.block_table_stride = table_stride_;
    params.row_requests = requests_.data();
    params.row_limits = limits_.data();
    params.scale = options_.scale;
    params.out = rows_view(out_);
    return params;
  }

  Problem& run() {
    out_.fill(kUntouched);
    attend_rows(params());
    return *this;
  }

  // Every row, or about `most_rows` of them.
  void check(size_t most_rows = SIZE_MAX) const {
    const size_t step = std::max<size_t>(1, rows_.size() / most_rows);
    for (size_t row = 0; row < rows_.size(); row += step) {
      for (int64_t head = 0; head < heads_; ++head) {
        if (!check_vector(row, head)) return;
      }
      check_gap(row);
    }
  }

  const std::vector<unsigned char>& output_bytes() const { return out_.bytes(); }
  std::vector<double> output(size_t row, int64_t head) const { return vector(out_, row, head); }
  const oracle::DenseKV& dense(size_t request) const { return dense_[request]; }
  const std::vector<Row>& rows() const { return rows_; }
  Elements& pool() { return pool_; }
  Elements& query() { return query_; }
  int64_t query_index(size_t row, int64_t head) const {
    return row * token_stride() + head * head_stride();
  }
  int64_t key_index(size_t request, int64_t token, int64_t head, int64_t dim) const {
    return options_.layout.key(shape_, place(request, token, head, dim));
  }

 private:
  static constexpr float kUntouched = 512.0F;

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  static Shape shape_for(const Options& options, const std::vector<int64_t>& request_tokens) {
    int64_t blocks = 3;  // some that nobody holds
    for (const int64_t tokens : request_tokens) blocks += ceil_div(tokens, options.block_size);
    return {blocks, options.kv_heads, options.block_size, options.head_size};
  }

  // As a slice of fused projections: gaps after each head and each token.
  int64_t head_stride() const { return options_.head_size + 8; }
  int64_t token_stride() const { return (heads_ + 2) * head_stride() + 24; }

  RowsView rows_view(Elements& elements) const {
    return {elements.data(), options_.dtype,     static_cast<int64_t>(rows_.size()),
            heads_,          options_.head_size, token_stride(),
            head_stride()};
  }

  Place place(size_t request, int64_t token, int64_t head, int64_t dim) const {
    return {table_[request * table_stride_ + token / options_.block_size], head,
            token % options_.block_size, dim};
  }

  oracle::DenseKV write_request(size_t request, int64_t tokens, std::mt19937& random,
                                std::normal_distribution<float>& normal) {
    oracle::DenseKV dense;
    dense.num_heads = options_.kv_heads;
    dense.head_size = options_.head_size;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t head = 0; head < options_.kv_heads; ++head) {
        for (int64_t d = 0; d < options_.head_size; ++d) {
          const Place p = place(request, t, head, d);
          const int64_t key = options_.layout.key(shape_, p);
          const int64_t value = options_.layout.value(shape_, p);
          pool_.set(key, normal(random));
          pool_.set(value, normal(random));
          dense.keys.push_back(pool_.get(key));
          dense.values.push_back(pool_.get(value));
        }
      }
    }
    return dense;
  }

  std::vector<double> vector(const Elements& elements, size_t row, int64_t head) const {
    std::vector<double> values(options_.head_size);
    for (int64_t d = 0; d < options_.head_size; ++d) {
      values[d] = elements.get(query_index(row, head) + d);
    }
    return values;
  }

  bool check_vector(size_t row, int64_t head) const {
    const std::vector<double> query = vector(query_, row, head);
    double most = 0.0;
    const std::vector<double> expected =
        oracle::attend(dense_[rows_[row].request], head / options_.group, query.data(),
                       options_.scale, rows_[row].limit, &most);
    const std::vector<double> actual = output(row, head);
    for (int64_t d = 0; d < options_.head_size; ++d) {
      // A score has a relative error of some float32 roundings, which the exponential turns into an
      // absolute one; the weights of about unit values add up to 1.
      const double tolerance =
          4e-6 * (1.0 + 0.25 * most) + std::fabs(expected[d]) * rounding_of(options_.dtype);
      if (std::fabs(actual[d] - expected[d]) <= tolerance) continue;
      ADD_FAILURE() << "row " << row << " (request " << rows_[row].request << ", limit "
                    << rows_[row].limit << "), head " << head << ", dim " << d << ": " << actual[d]
                    << ", expected " << expected[d] << " +- " << tolerance;
      return false;
    }
    return true;
  }

  void check_gap(size_t row) const {
    for (int64_t i = 0; i < token_stride(); ++i) {
      const bool in_head = i < heads_ * head_stride() && i % head_stride() < options_.head_size;
      if (!in_head) {
        ASSERT_EQ(out_.get(row * token_stride() + i), kUntouched) << "between the outputs";
      }
    }
  }

  Options options_;
  std::vector<Row> rows_;
  int64_t heads_;
  Shape shape_;
  Elements pool_;
  Elements query_;
  Elements out_;
  std::vector<int32_t> table_;
  int64_t table_stride_ = 0;
  std::vector<oracle::DenseKV> dense_;
  std::vector<int32_t> requests_;
  std::vector<int64_t> limits_;
};

// Rows of `request` at each position of [begin, end) with the given probability.
void add_rows(std::vector<Row>& rows, int32_t request, int64_t begin, int64_t end,
              double probability, unsigned seed = 7) {
  std::mt19937 random(seed);
  std::bernoulli_distribution chosen(probability);
  for (int64_t position = begin; position < end; ++position) {
    if (chosen(random)) rows.push_back({request, position + 1});
  }
}

std::vector<Row> scattered(int64_t tokens, double probability) {
  std::vector<Row> rows;
  add_rows(rows, 0, 0, tokens, probability);
  return rows;
}

class AttendRows : public ImplementationTest {
 protected:
  // An implementation that takes its time gets smaller problems.
  static bool is_slow() { return GetParam().name == "scalar" || GetParam().how == "emulated"; }
};

PHASEKV_FOR_EACH_IMPLEMENTATION(AttendRows);

TEST_P(AttendRows, EveryHeadSize) {
  for (int64_t head_size = 8; head_size <= 256; head_size += 8) {
    SCOPED_TRACE(head_size);
    Options options;
    options.head_size = head_size;
    options.scale = 1.0F / std::sqrt(static_cast<float>(head_size));
    Problem(options, {150}, scattered(150, 0.4)).run().check();
  }
}

TEST_P(AttendRows, EveryGroupAndItsLastMicroTile) {
  for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 16, 30}) {
    for (const int64_t kv_heads : {1, 3}) {
      for (int64_t rows = 1; rows <= 13; ++rows) {
        SCOPED_TRACE(testing::Message() << group << " x " << kv_heads << ", rows " << rows);
        Options options;
        options.group = group;
        options.kv_heads = kv_heads;
        options.head_size = 32;
        std::vector<Row> list;
        for (int64_t i = 0; i < rows; ++i) list.push_back({0, 70 + 3 * i});
        Problem(options, {120}, list).run().check();
      }
    }
  }
}

TEST_P(AttendRows, EveryBlockSize) {
  for (const int64_t block_size : {1, 2, 3, 7, 8, 13, 16, 24, 32, 40, 48, 64, 96, 100, 128, 200}) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      SCOPED_TRACE(block_size);
      Options options;
      options.block_size = block_size;
      options.dtype = dtype;
      Problem(options, {301}, scattered(301, 0.2)).run().check();
    }
  }
}

TEST_P(AttendRows, EveryLayoutAndType) {
  for (const BlockLayout& layout : {vec_layout(), vec_layout("vec16"), amx_layout(), nhd_layout(),
                                    swapped_layout(), sparse_layout()}) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
      for (const int64_t head_size : {32, 64, 96, 24, 40}) {
        const bool packed = layout.name == "amx";
        if (packed && (dtype != DataType::bfloat16 || head_size % 32 != 0)) continue;
        for (const int64_t block_size : {32, 96, 5}) {
          if (packed && block_size % 32 != 0) continue;
          SCOPED_TRACE(testing::Message() << layout.name << ", head size " << head_size
                                          << ", block size " << block_size);
          Options options;
          options.layout = layout;
          options.dtype = dtype;
          options.head_size = head_size;
          options.block_size = block_size;
          Problem(options, {203}, scattered(203, 0.3)).run().check(25);
        }
      }
    }
  }
}

// Sequence lengths (query, keys) with which vLLM once went wrong.
TEST_P(AttendRows, RaggedPrefills) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    Options options;
    options.dtype = dtype;
    options.kv_heads = 3;
    options.head_size = 96;
    options.block_size = 96;
    options.scale = 0.1F;
    const std::vector<int64_t> tokens = {is_slow() ? 345 : 2345, 5, 16, is_slow() ? 1131 : 5131};
    const std::vector<int64_t> queries = {tokens[0], 5, 3, 134};
    std::vector<Row> rows;
    for (int32_t request = 0; request < 4; ++request) {
      add_rows(rows, request, tokens[request] - queries[request], tokens[request], 1.0);
    }
    Problem(options, tokens, rows).run().check(40);
  }
}

TEST_P(AttendRows, ScatteredRowsOfALongPrompt) {
  for (const double ratio : {0.05, 0.3}) {
    Options options;
    options.kv_heads = 3;
    options.block_size = 128;
    Problem(options, {2100}, scattered(2100, ratio)).run().check(40);
  }
}

// Decode rows among prefills, requests without a row, lone rows over keys that are cut in parts.
TEST_P(AttendRows, MixedBatches) {
  for (const int64_t block_size : {128, 16, 7}) {
    for (const DataType dtype : {DataType::float32, DataType::float16}) {
      SCOPED_TRACE(block_size);
      Options options;
      options.dtype = dtype;
      options.block_size = block_size;
      options.head_size = 32;
      const std::vector<int64_t> tokens = {4321, 40, 700, 2049, 9, 2048, 6200};
      std::vector<Row> rows = {{0, 4321}};
      add_rows(rows, 2, 0, 700, 0.3);
      rows.insert(rows.end(), {{3, 2049}, {4, 0}, {4, 9}, {5, 2048}});
      rows.insert(rows.end(), {{6, 6200}, {6, 0}, {6, 1}, {6, 2048}, {6, 2050}, {6, 6199}});
      Problem(options, tokens, rows).run().check();
    }
  }
}

TEST_P(AttendRows, RowsInAnyOrder) {
  std::vector<Row> rows = scattered(600, 0.3);
  Options options;
  options.kv_heads = 1;
  std::mt19937 random(5);
  std::shuffle(rows.begin(), rows.end(), random);
  Problem(options, {600}, rows).run().check();
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.limit > b.limit; });
  Problem(options, {600}, rows).run().check();
  for (Row& row : rows) row.limit = 77;
  Problem(options, {600}, rows).run().check();
}

TEST_P(AttendRows, BlockIdsDoNotMatter) {
  for (const BlockLayout& layout : {vec_layout(), nhd_layout()}) {
    for (const int64_t block_size : {32, 16}) {
      Options options;
      options.layout = layout;
      options.block_size = block_size;
      std::vector<Row> rows = {{0, 3000}};
      add_rows(rows, 1, 0, 400, 0.4);
      Problem first(options, {3000, 400}, rows);
      options.block_seed = 99;
      Problem second(options, {3000, 400}, rows);
      EXPECT_EQ(first.run().output_bytes(), second.run().output_bytes());
    }
  }
}

TEST_P(AttendRows, ThreadsDoNotMatter) {
  Options options;
  options.block_size = 96;
  std::vector<Row> rows = {{0, 7000}, {0, 7001}};
  add_rows(rows, 1, 0, 500, 0.5);
  rows.push_back({2, 4000});
  Problem problem(options, {7001, 500, 4000}, rows);
  omp_set_num_threads(1);
  const std::vector<unsigned char> alone = problem.run().output_bytes();
  problem.check(60);
  for (const int threads : {2, 3, 5, 16, 64}) {
    omp_set_num_threads(threads);
    EXPECT_EQ(problem.run().output_bytes(), alone) << threads << " threads";
  }
}

// The other rows of a request change a row by rounding at most.
TEST_P(AttendRows, CompanyDoesNotMatter) {
  const std::vector<Row> rows = scattered(1500, 0.3);
  Options options;
  Problem together(options, {1500}, rows);
  together.run();
  for (const size_t i : {size_t{0}, size_t{100}, rows.size() - 1}) {
    Problem alone(options, {1500}, {rows[i]});
    for (int64_t head = 0; head < 6; ++head) {
      for (int64_t d = 0; d < 64; ++d) {
        alone.query().set(
            alone.query_index(0, head) + d,
            static_cast<float>(together.query().get(together.query_index(i, head) + d)));
      }
    }
    alone.run();
    for (int64_t head = 0; head < 6; ++head) {
      const std::vector<double> expected = together.output(i, head);
      const std::vector<double> actual = alone.output(0, head);
      for (int64_t d = 0; d < 64; ++d) ASSERT_NEAR(actual[d], expected[d], 1e-6) << "row " << i;
    }
  }
}

TEST_P(AttendRows, NoKeysGiveZeros) {
  const std::vector<double> zeros(64, 0.0);
  for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
    Options options;
    options.dtype = dtype;
    Problem some(options, {50}, {{0, 0}, {0, 50}, {0, 0}});
    some.run().check();
    EXPECT_EQ(some.output(0, 0), zeros);
    EXPECT_EQ(some.output(2, 5), zeros);
    Problem none(options, {50}, std::vector<Row>(40, {0, 0}));
    none.run().check();
    EXPECT_EQ(none.output(0, 3), zeros);
    EXPECT_EQ(none.output(39, 5), zeros);
  }
}

TEST_P(AttendRows, OneKeyGivesItsValue) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
    Options options;
    options.dtype = dtype;
    options.query_spread = 30.0F;
    Problem problem(options, {1, 5}, {{0, 1}, {1, 1}});
    problem.run();
    for (size_t request = 0; request < 2; ++request) {
      for (int64_t head = 0; head < 6; ++head) {
        const double* value = problem.dense(request).values.data() + head / 3 * 64;
        EXPECT_EQ(problem.output(request, head), std::vector<double>(value, value + 64));
      }
    }
  }
}

TEST_P(AttendRows, NoRowsDoNothing) { Problem(Options{}, {50}, {}).run(); }

// Scores of hundreds, where float16 arithmetic would overflow and a softmax without its maximum
// would be infinite.
TEST_P(AttendRows, SpreadScores) {
  for (const DataType dtype : {DataType::float32, DataType::float16}) {
    for (const float spread : {20.0F, 100.0F}) {
      Options options;
      options.dtype = dtype;
      options.query_spread = spread;
      Problem(options, {500}, scattered(500, 0.3)).run().check();
    }
  }
}

// Scores that rise slowly and fast, fall, and stay far below zero, chunk after chunk.
TEST_P(AttendRows, RisingAndFallingScores) {
  for (const float step : {0.004F, 0.05F, 1.5F, -0.05F, -1.5F}) {
    for (const float offset : {0.0F, -500.0F}) {
      SCOPED_TRACE(testing::Message() << step << " per token, from " << offset);
      Options options;
      options.kv_heads = 1;
      options.group = 1;
      options.head_size = 8;
      options.scale = 1.0F;
      Problem problem(options, {400}, scattered(400, 0.2));
      oracle::DenseKV dense = problem.dense(0);
      for (int64_t t = 0; t < 400; ++t) {
        for (int64_t d = 0; d < 8; ++d) {
          const float key = d == 0 ? offset + step * static_cast<float>(t) : 0.0F;
          problem.pool().set(problem.key_index(0, t, 0, d), key);
          dense.keys[t * 8 + d] = key;
        }
      }
      for (size_t row = 0; row < problem.rows().size(); ++row) {
        problem.query().set(problem.query_index(row, 0), 1.0F);
      }
      problem.run();
      const std::vector<double> query = {1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
      for (size_t row = 0; row < problem.rows().size(); ++row) {
        double most = 0.0;
        const std::vector<double> expected =
            oracle::attend(dense, 0, query.data(), 1.0, problem.rows()[row].limit, &most);
        const std::vector<double> actual = problem.output(row, 0);
        for (int64_t d = 0; d < 8; ++d) {
          ASSERT_NEAR(actual[d], expected[d], 4e-6 * (1.0 + 0.25 * most)) << row;
        }
      }
    }
  }
}

// A key that is not a number spoils the rows that attend it, visibly, and no other.
TEST_P(AttendRows, NotANumberIsNotHidden) {
  Options options;
  Problem problem(options, {300}, scattered(300, 0.5));
  problem.pool().set(problem.key_index(0, 100, 1, 5), std::numeric_limits<float>::quiet_NaN());
  problem.run();
  for (size_t row = 0; row < problem.rows().size(); ++row) {
    for (int64_t head = 0; head < 6; ++head) {
      const bool spoilt = head >= 3 && problem.rows()[row].limit > 100;
      for (const double x : problem.output(row, head)) {
        ASSERT_EQ(std::isnan(x), spoilt) << "row " << row << ", head " << head;
      }
    }
  }
}

// Blocks whose elements lie more than 2^32 elements into the pool.
TEST_P(AttendRows, OffsetsBeyond32Bits) {
  constexpr int64_t kBlockSize = 32;
  constexpr int64_t kHeadSize = 32;
  constexpr int64_t kBlockStride = int64_t{1} << 20;
  constexpr int64_t kBlocks = int64_t{1} << 13;
  const size_t bytes = sizeof(float) * kBlockStride * kBlocks;
  void* pool = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(pool, MAP_FAILED);
  const PagedKV kv = cpu_paged_kv("vec", pool, DataType::float32, kBlocks, 1, kBlockSize, kHeadSize,
                                  kBlockStride, 2 * kBlockSize * kHeadSize);
  const std::vector<int32_t> table = {static_cast<int32_t>(kBlocks - 1), 4097, 0};
  oracle::DenseKV dense;
  dense.num_heads = 1;
  dense.head_size = kHeadSize;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int64_t t = 0; t < 3 * kBlockSize; ++t) {
    float* block = static_cast<float*>(pool) + kBlockStride * table[t / kBlockSize];
    for (int64_t d = 0; d < kHeadSize; ++d) {
      float& key = block[d * kBlockSize + t % kBlockSize];
      float& value = block[kBlockSize * kHeadSize + t % kBlockSize * kHeadSize + d];
      key = normal(random);
      value = normal(random);
      dense.keys.push_back(key);
      dense.values.push_back(value);
    }
  }
  std::vector<float> query(kHeadSize);
  std::vector<float> out(kHeadSize);
  for (float& x : query) x = normal(random);
  const std::vector<double> wide(query.begin(), query.end());
  const std::vector<int32_t> requests = {0};
  const std::vector<int64_t> limits = {90};
  AttendRowsParams params;
  params.query = {query.data(), DataType::float32, 1, 1, kHeadSize, kHeadSize, kHeadSize};
  params.out = {out.data(), DataType::float32, 1, 1, kHeadSize, kHeadSize, kHeadSize};
  params.key = kv.key;
  params.value = kv.value;
  params.block_table = table.data();
  params.num_requests = 1;
  params.block_table_stride = 3;
  params.row_requests = requests.data();
  params.row_limits = limits.data();
  attend_rows(params);
  munmap(pool, bytes);
  double most = 0.0;
  const std::vector<double> expected = oracle::attend(dense, 0, wide.data(), 1.0, limits[0], &most);
  for (int64_t d = 0; d < kHeadSize; ++d) {
    EXPECT_NEAR(out[d], expected[d], 4e-6 * (1.0 + 0.25 * most));
  }
}

TEST_P(AttendRows, RefusesLimitsBeyondTheBlockTable) {
  Problem problem(Options{}, {64}, {{0, 64}, {0, 64}});
  AttendRowsParams params = problem.params();
  for (const int64_t limit : {int64_t{65}, int64_t{-1}, int64_t{1} << 40}) {
    const std::vector<int64_t> limits = {64, limit};
    params.row_limits = limits.data();
    try {
      attend_rows(params);
      FAIL() << "took a limit of " << limit;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(error.argument().find("row_limits"), std::string::npos) << error.argument();
      EXPECT_EQ(error.value(), std::to_string(limit));
    }
  }
}

}  // namespace
}  // namespace phasekv
