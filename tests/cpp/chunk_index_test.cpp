// The chunk index against a quadratic oracle, and the prompts that would be slow for a naive one.
#include "phasekv/reuse/chunk_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "phasekv/error.h"

namespace phasekv::reuse {

std::ostream& operator<<(std::ostream& stream, const ChunkMatch& match) {
  return stream << match.key << " [" << match.prompt_begin << ", " << match.prompt_end << ") from "
                << match.chunk_begin;
}

namespace {

using Tokens = std::vector<int32_t>;

struct NamedChunk {
  std::string key;
  Tokens tokens;
};

struct OracleRun {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t chunk_begin = 0;
  const NamedChunk* chunk = nullptr;

  bool whole() const {
    return chunk_begin == 0 && end - begin == static_cast<int64_t>(chunk->tokens.size());
  }
};

// The rules of chunk_index.h, tried out token by token. `chunks` are in the order of adding.
std::vector<ChunkMatch> oracle_find(const std::vector<NamedChunk>& chunks, const Tokens& prompt,
                                    int64_t min_match) {
  const auto prompt_size = static_cast<int64_t>(prompt.size());
  std::vector<OracleRun> runs;  // the best at each beginning
  for (int64_t begin = 0; begin < prompt_size; ++begin) {
    OracleRun best;
    Tokens best_rest;
    for (const NamedChunk& chunk : chunks) {
      const auto chunk_size = static_cast<int64_t>(chunk.tokens.size());
      for (int64_t offset = 0; offset < std::min<int64_t>(3, chunk_size); ++offset) {
        int64_t length = 0;
        while (begin + length < prompt_size && offset + length < chunk_size &&
               prompt[begin + length] == chunk.tokens[offset + length]) {
          ++length;
        }
        if (length < min_match) continue;
        const Tokens rest(chunk.tokens.begin() + offset, chunk.tokens.end());
        const int64_t best_length = best.end - best.begin;
        const bool is_better = length != best_length        ? length > best_length
                               : offset != best.chunk_begin ? offset < best.chunk_begin
                                                            : rest < best_rest;
        if (!best.chunk || is_better) {
          best = {begin, begin + length, offset, &chunk};
          best_rest = rest;
        }
      }
    }
    if (best.chunk) runs.push_back(best);
  }

  std::vector<OracleRun> matches;
  for (int64_t position = 0; position < prompt_size;) {
    const OracleRun* farthest = nullptr;
    for (const OracleRun& run : runs) {
      if (run.begin <= position && (!farthest || run.end > farthest->end)) farthest = &run;
    }
    if (!farthest || farthest->end - position < min_match) {
      ++position;
      continue;
    }
    OracleRun match = *farthest;
    if (match.begin < position) {
      if (match.whole() && !matches.back().whole()) {
        matches.back().end = match.begin;
        if (matches.back().end - matches.back().begin < min_match) matches.pop_back();
      } else {
        match.chunk_begin += position - match.begin;
        match.begin = position;
      }
    }
    matches.push_back(match);
    position = match.end;
  }

  std::vector<ChunkMatch> found;
  found.reserve(matches.size());
  for (const OracleRun& match : matches) {
    found.push_back({match.chunk->key, match.begin, match.end, match.chunk_begin});
  }
  return found;
}

Tokens random_tokens(std::mt19937& generator, int64_t count, int32_t vocabulary) {
  std::uniform_int_distribution<int32_t> token(0, vocabulary - 1);
  Tokens tokens(count);
  for (int32_t& value : tokens) value = token(generator);
  return tokens;
}

Tokens sequence(int64_t count, int32_t first) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens joined(std::initializer_list<Tokens> parts) {
  Tokens tokens;
  for (const Tokens& part : parts) tokens.insert(tokens.end(), part.begin(), part.end());
  return tokens;
}

Tokens slice(const Tokens& tokens, int64_t begin, int64_t end) {
  return {tokens.begin() + begin, tokens.begin() + end};
}

using Matches = std::vector<ChunkMatch>;

TEST(ChunkIndex, FindsChunksAnywhereInAnyOrder) {
  ChunkIndex index;
  const Tokens a = sequence(40, 1000);
  const Tokens b = sequence(17, 2000);
  const Tokens c = sequence(300, 3000);
  EXPECT_TRUE(index.add("a", a));
  EXPECT_TRUE(index.add("b", b));
  EXPECT_TRUE(index.add("c", c));
  EXPECT_EQ(index.size(), 3);
  EXPECT_EQ(index.find(joined({a, b, c})),
            (Matches{{"a", 0, 40, 0}, {"b", 40, 57, 0}, {"c", 57, 357, 0}}));
  EXPECT_EQ(
      index.find(joined({sequence(5, 0), c, b, sequence(9, 50), a, a})),
      (Matches{{"c", 5, 305, 0}, {"b", 305, 322, 0}, {"a", 331, 371, 0}, {"a", 371, 411, 0}}));
  EXPECT_TRUE(index.find(sequence(500, 10000)).empty());
}

TEST(ChunkIndex, EmptyAndShortInputsFindNothing) {
  ChunkIndex index;
  EXPECT_TRUE(index.find({}).empty());
  EXPECT_TRUE(index.find(sequence(100, 0)).empty());
  EXPECT_FALSE(index.add("empty", {}));
  EXPECT_FALSE(index.add("short", sequence(15, 0)));
  EXPECT_EQ(index.size(), 0);
  EXPECT_TRUE(index.add("just", sequence(16, 0)));
  EXPECT_TRUE(index.find({}).empty());
  EXPECT_TRUE(index.find(sequence(15, 0)).empty());
  EXPECT_EQ(index.find(sequence(16, 0)), (Matches{{"just", 0, 16, 0}}));
}

TEST(ChunkIndex, FirstAddedStaysAndRemovedIsGone) {
  ChunkIndex index(4);
  EXPECT_TRUE(index.add("a", sequence(10, 0)));
  EXPECT_FALSE(index.add("a", sequence(10, 500)));
  EXPECT_TRUE(index.find(sequence(10, 500)).empty());
  EXPECT_TRUE(index.contains("a"));
  EXPECT_TRUE(index.remove("a"));
  EXPECT_FALSE(index.remove("a"));
  EXPECT_FALSE(index.contains("a"));
  EXPECT_TRUE(index.find(sequence(10, 0)).empty());
  EXPECT_TRUE(index.add("a", sequence(10, 500)));
  EXPECT_EQ(index.find(sequence(10, 500)), (Matches{{"a", 0, 10, 0}}));
}

TEST(ChunkIndex, SurvivesTokensMergedAtTheSeams) {
  ChunkIndex index;
  const Tokens chunk = sequence(50, 100);
  index.add("a", chunk);
  const Tokens before = sequence(7, 9000);
  for (int64_t lost_first = 0; lost_first <= 3; ++lost_first) {
    for (int64_t lost_last = 0; lost_last <= 5; ++lost_last) {
      const Tokens prompt =
          joined({before, slice(chunk, lost_first, 50 - lost_last), sequence(7, 9500)});
      const Matches expected =
          lost_first == 3 ? Matches{} : Matches{{"a", 7, 57 - lost_first - lost_last, lost_first}};
      EXPECT_EQ(index.find(prompt), expected) << lost_first << " " << lost_last;
    }
  }
}

TEST(ChunkIndex, AWholeChunkIsNotCutByAPartialOne) {
  ChunkIndex index(4);
  const Tokens header = sequence(5, 700);
  const Tokens note = joined({header, sequence(20, 800)});
  index.add("stored with a preface", joined({sequence(30, 0), header, sequence(20, 900)}));
  index.add("note", note);
  EXPECT_EQ(index.find(joined({sequence(30, 0), note})),
            (Matches{{"stored with a preface", 0, 30, 0}, {"note", 30, 55, 0}}));
  EXPECT_EQ(index.find(joined({sequence(28, 2), note})),
            (Matches{{"stored with a preface", 0, 28, 2}, {"note", 28, 53, 0}}));
  // Two tokens of the preface would be left: not worth a match.
  ChunkIndex short_preface(4);
  short_preface.add("preface", joined({sequence(2, 0), header, sequence(20, 900)}));
  short_preface.add("note", note);
  EXPECT_EQ(short_preface.find(joined({sequence(2, 0), note})), (Matches{{"note", 2, 27, 0}}));
}

TEST(ChunkIndex, OneTokenWindowsWork) {
  ChunkIndex index(1);
  index.add("one", Tokens{5});
  EXPECT_EQ(index.find(Tokens{4, 5, 5, 6}), (Matches{{"one", 1, 2, 0}, {"one", 2, 3, 0}}));
}

TEST(ChunkIndex, ExtremeTokenValuesAreTokens) {
  ChunkIndex index(2);
  index.add("a", Tokens{INT32_MIN, -1, 0, INT32_MAX});
  EXPECT_EQ(index.find(Tokens{0, INT32_MIN, -1, 0, INT32_MAX, 0}), (Matches{{"a", 1, 5, 0}}));
}

TEST(ChunkIndex, RefusesBadArgumentsByName) {
  for (const int64_t min_match : {int64_t{0}, int64_t{-1}, int64_t{1} << 31}) {
    try {
      ChunkIndex index(min_match);
      FAIL() << min_match;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(error.argument(), "min_match");
      EXPECT_EQ(error.value(), std::to_string(min_match));
    }
  }
  EXPECT_THROW(ChunkIndex(16, ~uint64_t{0}), Error);
}

// Few token values and short chunks: repeats, overlaps and nested chunks all the time.
TEST(ChunkIndex, AgreesWithTheOracleWhileChunksComeAndGo) {
  std::mt19937 generator(20240607);
  const auto uniform = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
  };
  int64_t found = 0;
  for (int round = 0; round < 400; ++round) {
    const int64_t min_match = uniform(1, 6);
    const auto vocabulary = static_cast<int32_t>(uniform(1, 4));
    ChunkIndex index(min_match);
    std::vector<NamedChunk> chunks;
    for (int step = 0; step < 12; ++step) {
      if (!chunks.empty() && uniform(0, 3) == 0) {
        const auto victim = chunks.begin() + uniform(0, static_cast<int64_t>(chunks.size()) - 1);
        EXPECT_TRUE(index.remove(victim->key));
        chunks.erase(victim);
      } else {
        NamedChunk chunk{"chunk " + std::to_string(step),
                         random_tokens(generator, uniform(1, 80), vocabulary)};
        if (!chunks.empty() && uniform(0, 1) == 0) {  // a common header
          const Tokens& other = chunks.back().tokens;
          chunk.tokens = joined(
              {slice(other, 0, uniform(0, static_cast<int64_t>(other.size()))), chunk.tokens});
        }
        const bool is_long = static_cast<int64_t>(chunk.tokens.size()) >= min_match;
        EXPECT_EQ(index.add(chunk.key, chunk.tokens), is_long);
        if (is_long) chunks.push_back(chunk);
      }
      Tokens prompt = random_tokens(generator, uniform(0, 20), vocabulary);
      for (int64_t part = uniform(0, 4); part > 0 && !chunks.empty(); --part) {
        const Tokens& chunk = chunks[uniform(0, static_cast<int64_t>(chunks.size()) - 1)].tokens;
        const auto size = static_cast<int64_t>(chunk.size());
        const int64_t begin = std::min(size, uniform(0, 3));
        prompt = joined({prompt, slice(chunk, begin, uniform(begin, size)),
                         random_tokens(generator, uniform(0, 3), vocabulary)});
      }
      const Matches matches = index.find(prompt);
      ASSERT_EQ(matches, oracle_find(chunks, prompt, min_match)) << "round " << round;
      found += static_cast<int64_t>(matches.size());
    }
    EXPECT_EQ(index.size(), static_cast<int64_t>(chunks.size()));
  }
  EXPECT_GT(found, 10000);
}

// Longer than what is compared directly, so that hashes find where texts part.
TEST(ChunkIndex, AgreesWithTheOracleOnLongChunks) {
  std::mt19937 generator(7);
  const auto uniform = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
  };
  const Tokens text = random_tokens(generator, 600, 50);
  ChunkIndex index;
  std::vector<NamedChunk> chunks;
  for (int i = 0; i < 40; ++i) {  // all begin alike and part at different places
    NamedChunk chunk{std::to_string(i), slice(text, 0, uniform(20, 600))};
    const Tokens tail = random_tokens(generator, uniform(0, 100), 50);
    chunk.tokens.insert(chunk.tokens.end(), tail.begin(), tail.end());
    index.add(chunk.key, chunk.tokens);
    chunks.push_back(chunk);
  }
  for (int round = 0; round < 60; ++round) {
    Tokens prompt;
    for (int part = 0; part < 3; ++part) {
      const Tokens& chunk = chunks[uniform(0, 39)].tokens;
      prompt = joined(
          {prompt, slice(chunk, uniform(0, 2), uniform(10, static_cast<int64_t>(chunk.size())))});
    }
    ASSERT_EQ(index.find(prompt), oracle_find(chunks, prompt, 16)) << "round " << round;
  }
}

// With base 1 a hash is the sum of the tokens, so permutations collide.
TEST(ChunkIndex, CollidingHashesNeverMakeAWrongMatch) {
  std::mt19937 generator(11);
  for (int round = 0; round < 300; ++round) {
    ChunkIndex index(3, 1);
    std::map<std::string, Tokens> chunks;
    for (int i = 0; i < 30; ++i) {
      const std::string key = std::to_string(i);
      // Longer than what is compared before hashes are.
      chunks[key] = joined({Tokens(35, 1), random_tokens(generator, 80, 3)});
      index.add(key, chunks[key]);
    }
    Tokens prompt = random_tokens(generator, 200, 3);
    std::copy(chunks["3"].begin(), chunks["3"].end(), prompt.begin() + 50);
    int64_t position = 0;
    for (const ChunkMatch& match : index.find(prompt)) {
      EXPECT_GE(match.prompt_begin, position);
      EXPECT_GE(match.prompt_end - match.prompt_begin, 3);
      position = match.prompt_end;
      const int64_t length = match.prompt_end - match.prompt_begin;
      EXPECT_EQ(slice(prompt, match.prompt_begin, match.prompt_end),
                slice(chunks[match.key], match.chunk_begin, match.chunk_begin + length));
    }
    EXPECT_LE(position, 200);
    for (const auto& [key, tokens] : chunks) EXPECT_TRUE(index.remove(key));
    EXPECT_EQ(index.size(), 0);
    EXPECT_TRUE(index.find(prompt).empty());
  }
}

TEST(ChunkIndex, AMatchEndsWhereOnlyHashesAreEqual) {
  ChunkIndex index(16, 1);
  const Tokens header = sequence(40, 100);
  const Tokens tail = sequence(20, 200);
  index.add("a", joined({header, {1, 2}, tail}));
  // The rest of the run is true again, and long enough.
  EXPECT_EQ(index.find(joined({header, {2, 1}, tail})),
            (Matches{{"a", 0, 40, 0}, {"a", 42, 62, 42}}));
}

// Inputs on which work per token would grow with the number or the length of chunks. A quadratic
// search would not end within the test's time limit.
TEST(ChunkIndex, ThousandsOfChunksWithOneHeader) {
  std::mt19937 generator(3);
  const Tokens header = random_tokens(generator, 40, 1000);
  ChunkIndex index;
  std::vector<Tokens> notes;
  for (int i = 0; i < 20000; ++i) {
    notes.push_back(joined({header, random_tokens(generator, 60, 1000)}));
    ASSERT_TRUE(index.add(std::to_string(i), notes.back()));
  }
  Tokens prompt;
  Matches expected;
  for (int i = 0; i < 1000; ++i) {
    const auto note = static_cast<int64_t>(generator() % notes.size());
    const auto begin = static_cast<int64_t>(prompt.size());
    expected.push_back({std::to_string(note), begin, begin + 100, 0});
    prompt.insert(prompt.end(), notes[note].begin(), notes[note].end());
  }
  EXPECT_EQ(index.find(prompt), expected);
  Tokens headers;  // nothing but headers
  for (int i = 0; i < 2000; ++i) headers.insert(headers.end(), header.begin(), header.end());
  EXPECT_EQ(index.find(headers).size(), 2000U);
}

TEST(ChunkIndex, OneTokenRepeated) {
  ChunkIndex index;
  for (const int64_t length : {16, 17, 1000, 50000}) {
    index.add(std::to_string(length), Tokens(length, 7));
  }
  // The last one ends with the prompt, as do all runs from 81072 on.
  const Matches expected{{"50000", 0, 50000, 0},
                         {"50000", 50000, 100000, 0},
                         {"50000", 100000, 131072, 100000 - 81072}};
  EXPECT_EQ(index.find(Tokens(131072, 7)), expected);
}

TEST(ChunkIndex, MemoryIsGivenBack) {
  std::mt19937 generator(5);
  ChunkIndex index;
  const int64_t empty = index.nbytes();
  const auto fill = [&](int first) {
    for (int i = first; i < first + 500; ++i) {
      index.add(std::to_string(i), random_tokens(generator, 100, 1000));
    }
  };
  fill(0);
  const int64_t filled = index.nbytes();
  EXPECT_GT(filled - empty, 500 * 100 * 12);
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 500; ++i) index.remove(std::to_string(500 * round + i));
    EXPECT_EQ(index.size(), 0);
    EXPECT_LT(index.nbytes(), filled / 3);
    fill(500 * (round + 1));
    EXPECT_LT(index.nbytes(), filled + filled / 10);
  }
}

TEST(ChunkIndex, FindsWhileOthersAddAndRemove) {
  ChunkIndex index;
  const Tokens stable = sequence(64, 100000);
  index.add("stable", stable);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  writers.reserve(2);
  for (int writer = 0; writer < 2; ++writer) {
    writers.emplace_back([&, writer] {
      for (int i = 0; !stop; ++i) {
        const std::string key = std::to_string(writer) + "/" + std::to_string(i % 50);
        if (!index.remove(key)) index.add(key, sequence(64, 1000 * (i % 50)));
      }
    });
  }
  const Tokens prompt = joined({sequence(20, 500000), stable});
  for (int i = 0; i < 2000; ++i) {
    ASSERT_EQ(index.find(prompt), (Matches{{"stable", 20, 84, 0}}));
  }
  stop = true;
  for (std::thread& writer : writers) writer.join();
}

}  // namespace
}  // namespace phasekv::reuse
