// Finds stored chunks by content anywhere in a prompt, cheaply when there is none.
#pragma once

#include <cstdint>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace phasekv::reuse {

// prompt[prompt_begin, prompt_end) equals the tokens of chunk `key` from chunk_begin on.
struct ChunkMatch {
  std::string key;
  int64_t prompt_begin = 0;
  int64_t prompt_end = 0;   // exclusive
  int64_t chunk_begin = 0;  // index in the chunk of the token at prompt_begin

  bool operator==(const ChunkMatch&) const = default;
};

// What is found
// A *run* is a maximal stretch of the prompt that equals a stretch of a chunk, begins within the
// chunk's first kStartOffsets tokens and has at least min_match tokens. A run need not hold the
// whole chunk: a tokenizer may merge the text before or after a chunk into its first or last
// tokens. Chunks shorter than min_match are never found.
//
// Which runs are returned
// Matches are in prompt order and never overlap; a chunk may match several times. Of the runs that
// begin at one token the longest counts; of equally long ones that with the smaller chunk_begin,
// then the shortest chunk, then the smallest next token, then the one added first. From left to
// right, each match is the run that reaches farthest (of several, the one that begins first), cut
// on the left where the match before it ended, if min_match tokens are left of it. One exception:
// where a whole chunk would be cut by a match that is not a whole chunk, the latter is cut instead,
// and dropped below min_match tokens.
//
// Cost
// A 61-bit polynomial hash with a secret base rolls over the prompt; each position costs one probe
// of an open-addressing table, so n tokens without a match cost O(n). Where a window is known, its
// chunks are searched in lexicographic order with longest-common-prefix hashes: O(log chunks *
// log tokens), whatever the number of chunks that share a header. Hashes only guide: every token of
// every match is compared. Adding a chunk of t tokens costs O(t + chunks that share its window).
//
// Memory: 12 bytes a token and a few hundred a chunk, all given back by remove().
//
// All functions may be called from several threads at once; find() calls run side by side.
class ChunkIndex {
 public:
  // Windows of a chunk that can start a match: a tokenizer changes at most the first two tokens.
  static constexpr int64_t kStartOffsets = 3;

  // `min_match` >= 1 is in tokens. `hash_base` 0 draws a random base, which keeps collisions out of
  // a caller's hands; any other value in [1, 2^61 - 2] is for tests (with 1, hashes are sums).
  explicit ChunkIndex(int64_t min_match = 16, uint64_t hash_base = 0);

  // Remembers a chunk. False, without effect, if the key is known or there are fewer than min_match
  // tokens.
  bool add(const std::string& key, std::span<const int32_t> tokens);

  // Forgets a chunk. False if the key is not known.
  bool remove(const std::string& key);

  bool contains(const std::string& key) const;
  int64_t size() const;    // chunks
  int64_t nbytes() const;  // memory held, estimated from the containers' capacities
  int64_t min_match() const noexcept { return min_match_; }

  std::vector<ChunkMatch> find(std::span<const int32_t> tokens) const;

 private:
  struct Chunk {
    std::string key;
    std::vector<int32_t> tokens;
    std::vector<uint64_t> prefix_hashes;  // [tokens + 1]
    uint64_t sequence = 0;                // order of adding
  };

  // Tokens of a chunk from `offset` on.
  struct Suffix {
    uint32_t chunk = 0;  // into chunks_
    uint32_t offset = 0;
  };
  // Suffixes whose first window has one fingerprint: by offset, then lexicographically, then by
  // sequence.
  using Bucket = std::vector<Suffix>;

  // Open addressing, linear probing, deletion by shifting back (no tombstones).
  struct Slot {
    uint64_t fingerprint = kEmpty;
    uint32_t bucket = 0;  // into buckets_
  };
  static constexpr uint64_t kEmpty = ~uint64_t{0};  // no hash has this value

  struct Prompt;
  struct Run;
  struct Position;

  std::vector<uint64_t> prefix_hashes(std::span<const int32_t> tokens) const;
  uint64_t range_hash(const uint64_t* prefix_hashes, int64_t begin, int64_t length) const;

  size_t home_slot(uint64_t fingerprint) const;
  size_t find_slot(uint64_t fingerprint) const;
  void insert_suffix(Suffix suffix);
  void erase_suffix(Suffix suffix);
  void resize_slots(int bits);
  bool less(Suffix a, Suffix b) const;

  int64_t common_prefix(const Prompt& prompt, int64_t begin, Suffix suffix, int64_t known,
                        int64_t length) const;
  Position lower_bound(const Prompt& prompt, int64_t begin, int64_t length, const Suffix* first,
                       const Suffix* last) const;
  Run longest_run(const Prompt& prompt, int64_t begin, const Bucket& bucket) const;
  std::vector<Run> select(const Prompt& prompt, const std::vector<Run>& runs) const;

  const int64_t min_match_;
  uint64_t base_ = 0;

  mutable std::shared_mutex mutex_;
  std::vector<uint64_t> powers_;  // base_ ^ i, up to the longest chunk or min_match_
  std::vector<Chunk> chunks_;     // with holes, listed in free_chunks_
  std::vector<uint32_t> free_chunks_;
  std::vector<Bucket> buckets_;  // likewise
  std::vector<uint32_t> free_buckets_;
  std::unordered_map<std::string, uint32_t> by_key_;
  std::vector<Slot> slots_;  // 2 ^ slot_bits_
  int slot_bits_ = 0;
  size_t used_slots_ = 0;
  uint64_t next_sequence_ = 0;
};

}  // namespace phasekv::reuse
