#include "cpu/codes.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/quantized.h"
#include "cpu/rows.h"
#include "cpu/scratch.h"
#include "cpu/vector.h"

namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE {
namespace {

// The least and the largest of some elements. `poison` is 0, or NaN after one that is not finite,
// which a minimum alone would hide.
struct Extremes {
  Vec least = broadcast(__builtin_inff());
  Vec largest = broadcast(-__builtin_inff());
  Vec poison = zero();

  void add(Vec x) {
    least = min(x, least);
    largest = max(x, largest);
    poison = fma(x, zero(), poison);
  }
};

template <int kBits>
inline Vec scale_of(Vec least, Vec largest) {
  return (largest - least) / broadcast(static_cast<float>(kCodeMask<kBits>));
}

// What a code is a multiple of: infinity where the scale is 0 or NaN, so that codes are 0 there.
inline Vec divisor_of(Vec scale) {
  return max(scale, zero_where_less(broadcast(__builtin_inff()), zero() - scale, zero()));
}

struct GroupOfCodes {
  Vec zero_point;
  Vec divisor;
};

template <int kBits>
inline Vec code_of(Vec x, const GroupOfCodes& group) {
  const Vec quotient = max((x - group.zero_point) / group.divisor, zero());  // 0 for NaN
  return round(min(quotient, broadcast(static_cast<float>(kCodeMask<kBits>))));
}

// The word of each lane that holds the codes of element(begin) to element(end - 1). Half a word is
// a whole number below 2^16, into which the last code moves up as others come below it.
template <int kBits, bool kFull, typename Element>
inline void pack_word(int64_t begin, int64_t end, const GroupOfCodes& group, const Element& element,
                      uint32_t* words, int n) {
  constexpr int64_t kInHalf = kCodesInWord<kBits> / 2;
  const auto pack = [&](int64_t from, int64_t to) {
    Vec half = zero();
    for (int64_t i = to - 1; i >= from; --i) {
      half =
          fma(half, broadcast(static_cast<float>(1 << kBits)), code_of<kBits>(element(i), group));
    }
    return half;
  };
  const int64_t middle = end - begin < kInHalf ? end : begin + kInHalf;
  store_words<kFull>(words, pack(begin, middle), pack(middle, end), n);
}

// Groups along tokens. Rows of all heads are read as they lie; what a channel needs from one row to
// the next is in `memory`, three floats for each.
template <int kBits, typename T>
class TokenGroupWriter {
 public:
  TokenGroupWriter(const QuantizeParams& params, float* memory)
      : rows_(params.rows),
        out_(params.out),
        channels_(params.rows.heads * params.rows.head_size),
        first_(memory),
        second_(memory + channels_),
        poison_(memory + 2 * channels_) {}

  static int64_t floats_needed(const RowsView& rows) { return 3 * rows.heads * rows.head_size; }

  void run(Range groups) const {
    for (int64_t group = groups.begin; group < groups.end; ++group) {
      const int64_t begin = group * out_.group_size;
      const int64_t left = rows_.tokens - begin;
      const int64_t end = begin + (left < out_.group_size ? left : out_.group_size);
      find_extremes(begin, end);
      write_groups(begin);
      for (int64_t token = begin; token < end; token += kInWord) {
        write_words(token, token + kInWord < end ? token + kInWord : end);
      }
    }
  }

 private:
  static constexpr int64_t kInWord = kCodesInWord<kBits>;
  static constexpr int64_t kRows = 4;  // that are read together

  void find_extremes(int64_t begin, int64_t end) const {
    const Extremes none;
    for_each_channel([&](auto lanes, int64_t /*head*/, int64_t /*d*/, int64_t i, int n) {
      store_lanes<lanes.kFull>(first_ + i, none.least, n);
      store_lanes<lanes.kFull>(second_ + i, none.largest, n);
      store_lanes<lanes.kFull>(poison_ + i, none.poison, n);
    });
    for (int64_t token = begin; token < end; token += kRows) {
      const int64_t rows = end - token < kRows ? end - token : kRows;
      for_each_channel([&](auto lanes, int64_t head, int64_t d, int64_t i, int n) {
        Extremes extremes = {.least = load_lanes<lanes.kFull>(first_ + i, n),
                             .largest = load_lanes<lanes.kFull>(second_ + i, n),
                             .poison = load_lanes<lanes.kFull>(poison_ + i, n)};
        const T* row = row_of<const T>(rows_, token, head) + d;
        for (int64_t r = 0; r < rows; ++r) {
          extremes.add(load_lanes<lanes.kFull>(row + r * rows_.token_stride, n));
        }
        store_lanes<lanes.kFull>(first_ + i, extremes.least, n);
        store_lanes<lanes.kFull>(second_ + i, extremes.largest, n);
        store_lanes<lanes.kFull>(poison_ + i, extremes.poison, n);
      });
    }
  }

  // Scales and zero points; from then on the memory holds these zero points and the divisors.
  void write_groups(int64_t token) const {
    const QuantizedLine line = line_of_token<kBits>(out_, token, 0);
    for_lanes(0, channels_, [&](auto lanes, int64_t i, int n) {
      const Vec poison = load_lanes<lanes.kFull>(poison_ + i, n);
      const Vec least = load_lanes<lanes.kFull>(first_ + i, n) + poison;
      const Vec largest = load_lanes<lanes.kFull>(second_ + i, n);
      store_lanes<lanes.kFull>(line.zero_points + i, least, n);
      store_lanes<lanes.kFull>(line.scales + i, scale_of<kBits>(least, largest), n);
      store_lanes<lanes.kFull>(first_ + i, load_lanes<lanes.kFull>(line.zero_points + i, n), n);
      const Vec scale = load_lanes<lanes.kFull>(line.scales + i, n);
      store_lanes<lanes.kFull>(second_ + i, divisor_of(scale), n);
    });
  }

  // The words that hold the tokens [begin, end).
  void write_words(int64_t begin, int64_t end) const {
    uint32_t* words = line_of_token<kBits>(out_, begin, 0).codes;
    for_each_channel([&](auto lanes, int64_t head, int64_t d, int64_t i, int n) {
      const T* row = row_of<const T>(rows_, begin, head) + d;
      const GroupOfCodes codes = {.zero_point = load_lanes<lanes.kFull>(first_ + i, n),
                                  .divisor = load_lanes<lanes.kFull>(second_ + i, n)};
      const auto element = [&](int64_t token) {
        return load_lanes<lanes.kFull>(row + token * rows_.token_stride, n);
      };
      pack_word<kBits, lanes.kFull>(0, end - begin, codes, element, words + i, n);
    });
  }

  // function(lanes, head, d, head * head_size + d, n) for all channels of all heads.
  template <typename Function>
  void for_each_channel(const Function& function) const {
    for (int64_t head = 0; head < rows_.heads; ++head) {
      for_lanes(0, rows_.head_size, [&](auto lanes, int64_t d, int n) {
        function(lanes, head, d, head * rows_.head_size + d, n);
      });
    }
  }

  const RowsView& rows_;
  const QuantizedRows& out_;
  int64_t channels_;
  float* first_;   // least elements, then zero points
  float* second_;  // largest elements, then divisors
  float* poison_;
};

// Groups along channels. Each lane has a token of its own, so that nothing goes from lane to lane
// once the elements of kWidth tokens are transposed. `memory` holds them for one group.
template <int kBits, typename T>
class ChannelGroupWriter {
 public:
  ChannelGroupWriter(const QuantizeParams& params, float* memory)
      : rows_(params.rows),
        out_(params.out),
        words_(ceil_div(params.out.head_size, kInWord)),
        groups_(ceil_div(params.out.head_size, params.out.group_size)),
        memory_(memory) {}

  static int64_t floats_needed(const QuantizedRows& out) {
    return kWidth * (out.group_size < out.head_size ? out.group_size : out.head_size);
  }

  void run(Range tokens) const {
    for (int64_t token = tokens.begin; token < tokens.end; token += kWidth) {
      const int64_t left = tokens.end - token;
      const int count = left < kWidth ? static_cast<int>(left) : kWidth;
      for (int64_t head = 0; head < rows_.heads; ++head) {
        for (int64_t group = 0; group < groups_; ++group) write_group(token, count, head, group);
      }
    }
  }

 private:
  static constexpr int64_t kInWord = kCodesInWord<kBits>;

  // Of the tokens [token, token + count).
  void write_group(int64_t token, int count, int64_t head, int64_t group) const {
    const int64_t begin = group * out_.group_size;
    const int64_t left = out_.head_size - begin;
    const int64_t channels = left < out_.group_size ? left : out_.group_size;
    const Extremes extremes = transpose_group(token, count, head, begin, begin + channels);

    const Vec least = extremes.least + extremes.poison;
    Float16 scales[kWidth];
    Float16 zero_points[kWidth];
    store(scales, scale_of<kBits>(least, extremes.largest));
    store(zero_points, least);
    const int64_t row = token * rows_.heads + head;
    const QuantizedLine line = line_at(out_, row * words_, row * groups_ + group);
    for (int r = 0; r < count; ++r) {
      line.scales[r * rows_.heads * groups_] = scales[r];
      line.zero_points[r * rows_.heads * groups_] = zero_points[r];
    }

    const GroupOfCodes codes = {.zero_point = load(zero_points),
                                .divisor = divisor_of(load(scales))};
    const auto element = [&](int64_t channel) { return load(memory_ + channel * kWidth); };
    for (int64_t channel = 0; channel < channels; channel += kInWord) {
      uint32_t words[kWidth];
      const int64_t end = channels - channel < kInWord ? channels : channel + kInWord;
      pack_word<kBits, true>(channel, end, codes, element, words, kWidth);
      uint32_t* out = line.codes + (begin + channel) / kInWord;
      for (int r = 0; r < count; ++r) out[r * rows_.heads * words_] = words[r];
    }
  }

  // Channels [begin, end): the elements of each go to the memory, a lane for each token. Lanes that
  // have none repeat the last.
  Extremes transpose_group(int64_t token, int count, int64_t head, int64_t begin,
                           int64_t end) const {
    Extremes extremes;
    for_lanes(begin, end, [&](auto lanes, int64_t d, int n) {
      Vec columns[kWidth];
      for (int r = 0; r < kWidth; ++r) {
        const int64_t from = token + (r < count ? r : count - 1);
        columns[r] = load_lanes<lanes.kFull>(row_of<const T>(rows_, from, head) + d, n);
      }
      transpose(columns);
      const int wanted = lanes.kFull ? kWidth : n;
      for (int i = 0; i < wanted; ++i) {
        extremes.add(columns[i]);
        store(memory_ + (d - begin + i) * kWidth, columns[i]);
      }
    });
    return extremes;
  }

  const RowsView& rows_;
  const QuantizedRows& out_;
  int64_t words_;   // of a head of a token
  int64_t groups_;  // the same
  float* memory_;
};

template <typename Writer>
void write_in_parallel(const QuantizeParams& params, int threads, int64_t floats, int64_t items) {
  const Scratch scratch(threads, floats);
#pragma omp parallel num_threads(threads)
  Writer(params, scratch.part(omp_get_thread_num())).run(share_of_thread(items));
}

}  // namespace

void quantize(const QuantizeParams& params) {
  with_type(params.rows.dtype, [&](auto tag) {
    with_bits(params.out.bits, [&](auto bits) {
      using T = typename decltype(tag)::Type;
      constexpr int kBits = decltype(bits)::kBits;
      const RowsView& rows = params.rows;
      const int threads =
          threads_for(rows.tokens * rows.heads * rows.head_size * int64_t{sizeof(T)});
      if (params.out.axis == GroupAxis::tokens) {
        using Writer = TokenGroupWriter<kBits, T>;
        write_in_parallel<Writer>(params, threads, Writer::floats_needed(rows),
                                  ceil_div(rows.tokens, params.out.group_size));
      } else {
        using Writer = ChannelGroupWriter<kBits, T>;
        write_in_parallel<Writer>(params, threads, Writer::floats_needed(params.out), rows.tokens);
      }
    });
  });
}

}  // namespace phasekv::cpu::PHASEKV_ISA_NAMESPACE
