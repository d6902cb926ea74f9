#include "phasekv/reuse/chunk_index.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "phasekv/error.h"

namespace phasekv::reuse {
namespace {

// Arithmetic modulo the Mersenne prime 2^61 - 1: unlike modulo 2^64, no input collides for most
// bases, so nobody who does not know the base can make slow prompts.
constexpr uint64_t kModulus = (uint64_t{1} << 61) - 1;

__extension__ using Uint128 = unsigned __int128;

uint64_t reduce(uint64_t x) { return x >= kModulus ? x - kModulus : x; }

uint64_t multiply(uint64_t a, uint64_t b) {
  const Uint128 product = static_cast<Uint128>(a) * b;
  return reduce((static_cast<uint64_t>(product) & kModulus) + static_cast<uint64_t>(product >> 61));
}

uint64_t value_of(int32_t token) { return uint64_t{static_cast<uint32_t>(token)} + 1; }

// Tokens compared one by one before hashes take over.
constexpr int64_t kDirectTokens = 32;

constexpr int kMinSlotBits = 4;

}  // namespace

struct ChunkIndex::Prompt {
  std::span<const int32_t> tokens;
  std::vector<uint64_t> prefix_hashes;

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

struct ChunkIndex::Run {
  int64_t begin = 0;  // in the prompt
  int64_t end = 0;
  Suffix suffix;       // its first token lies at `begin`
  bool whole = false;  // holds a whole chunk
};

// Where a text belongs among sorted suffixes: before `at`, with `before` and `after` tokens in
// common with its two neighbours.
struct ChunkIndex::Position {
  const Suffix* at = nullptr;
  int64_t before = 0;
  int64_t after = 0;
};

ChunkIndex::ChunkIndex(int64_t min_match, uint64_t hash_base) : min_match_(min_match) {
  if (min_match < 1 || min_match > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::invalid_argument, "min_match", std::to_string(min_match),
                "between 1 and 2147483647 tokens");
  }
  if (hash_base >= kModulus) {
    throw Error(ErrorCode::invalid_argument, "hash_base", std::to_string(hash_base),
                "0 (random) or below 2^61 - 1");
  }
  base_ = hash_base;
  if (base_ == 0) {
    std::random_device device;
    std::uniform_int_distribution<uint64_t> bases(uint64_t{1} << 33, kModulus - 2);
    std::seed_seq seed{device(), device(), device(), device()};
    std::mt19937_64 generator(seed);
    base_ = bases(generator);
  }
  powers_.push_back(1);
  resize_slots(kMinSlotBits);
}

std::vector<uint64_t> ChunkIndex::prefix_hashes(std::span<const int32_t> tokens) const {
  std::vector<uint64_t> hashes(tokens.size() + 1);
  uint64_t hash = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    hash = reduce(multiply(hash, base_) + value_of(tokens[i]));
    hashes[i + 1] = hash;
  }
  return hashes;
}

uint64_t ChunkIndex::range_hash(const uint64_t* prefix_hashes, int64_t begin,
                                int64_t length) const {
  const uint64_t removed = multiply(prefix_hashes[begin], powers_[length]);
  return reduce(prefix_hashes[begin + length] + kModulus - removed);
}

size_t ChunkIndex::home_slot(uint64_t fingerprint) const {
  return (fingerprint * 0x9E3779B97F4A7C15) >> (64 - slot_bits_);
}

// The fingerprint's slot, or the empty one where it would go.
size_t ChunkIndex::find_slot(uint64_t fingerprint) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = home_slot(fingerprint);
  while (slots_[slot].fingerprint != kEmpty && slots_[slot].fingerprint != fingerprint) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

void ChunkIndex::resize_slots(int bits) {
  std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(size_t{1} << bits));
  slot_bits_ = bits;
  for (const Slot& slot : old) {
    if (slot.fingerprint != kEmpty) slots_[find_slot(slot.fingerprint)] = slot;
  }
}

bool ChunkIndex::less(Suffix a, Suffix b) const {
  if (a.offset != b.offset) return a.offset < b.offset;
  const Chunk& left = chunks_[a.chunk];
  const Chunk& right = chunks_[b.chunk];
  const auto order =
      std::lexicographical_compare_three_way(left.tokens.begin() + a.offset, left.tokens.end(),
                                             right.tokens.begin() + b.offset, right.tokens.end());
  return order != 0 ? order < 0 : left.sequence < right.sequence;
}

void ChunkIndex::insert_suffix(Suffix suffix) {
  // At most half full: probes stay short.
  if (2 * (used_slots_ + 1) > slots_.size()) resize_slots(slot_bits_ + 1);
  const Chunk& chunk = chunks_[suffix.chunk];
  const uint64_t fingerprint = range_hash(chunk.prefix_hashes.data(), suffix.offset, min_match_);
  Slot& slot = slots_[find_slot(fingerprint)];
  if (slot.fingerprint == kEmpty) {
    if (free_buckets_.empty()) {
      free_buckets_.push_back(static_cast<uint32_t>(buckets_.size()));
      buckets_.emplace_back();
    }
    slot = {fingerprint, free_buckets_.back()};
    free_buckets_.pop_back();
    ++used_slots_;
  }
  Bucket& bucket = buckets_[slot.bucket];
  const auto by_content = [this](Suffix a, Suffix b) { return less(a, b); };
  bucket.insert(std::upper_bound(bucket.begin(), bucket.end(), suffix, by_content), suffix);
}

void ChunkIndex::erase_suffix(Suffix suffix) {
  const Chunk& chunk = chunks_[suffix.chunk];
  const uint64_t fingerprint = range_hash(chunk.prefix_hashes.data(), suffix.offset, min_match_);
  size_t hole = find_slot(fingerprint);
  Bucket& bucket = buckets_[slots_[hole].bucket];
  const auto by_content = [this](Suffix a, Suffix b) { return less(a, b); };
  bucket.erase(std::lower_bound(bucket.begin(), bucket.end(), suffix, by_content));
  if (!bucket.empty()) return;

  Bucket().swap(bucket);
  free_buckets_.push_back(slots_[hole].bucket);
  --used_slots_;
  // Whatever sits behind the hole moves up, unless that would put it before its home slot.
  const size_t mask = slots_.size() - 1;
  for (size_t slot = (hole + 1) & mask; slots_[slot].fingerprint != kEmpty;
       slot = (slot + 1) & mask) {
    const size_t home = home_slot(slots_[slot].fingerprint);
    if (((slot - home) & mask) >= ((slot - hole) & mask)) {
      slots_[hole] = slots_[slot];
      hole = slot;
    }
  }
  slots_[hole] = {};
  if (slot_bits_ > kMinSlotBits && 16 * used_slots_ < slots_.size()) resize_slots(slot_bits_ - 1);
}

bool ChunkIndex::add(const std::string& key, std::span<const int32_t> tokens) {
  const auto count = static_cast<int64_t>(tokens.size());
  if (count < min_match_) return false;
  if (count > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::invalid_argument, "tokens", std::to_string(count) + " tokens",
                "at most 2147483647");
  }
  Chunk chunk{key, {tokens.begin(), tokens.end()}, prefix_hashes(tokens)};

  const std::unique_lock lock(mutex_);
  if (by_key_.contains(key)) return false;
  while (powers_.size() <= tokens.size()) powers_.push_back(multiply(powers_.back(), base_));
  if (free_chunks_.empty()) {
    free_chunks_.push_back(static_cast<uint32_t>(chunks_.size()));
    chunks_.emplace_back();
  }
  const uint32_t id = free_chunks_.back();
  free_chunks_.pop_back();
  chunk.sequence = next_sequence_++;
  chunks_[id] = std::move(chunk);
  by_key_.emplace(key, id);
  const int64_t starts = std::min(kStartOffsets, count - min_match_ + 1);
  for (int64_t offset = 0; offset < starts; ++offset) {
    insert_suffix({id, static_cast<uint32_t>(offset)});
  }
  return true;
}

bool ChunkIndex::remove(const std::string& key) {
  const std::unique_lock lock(mutex_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return false;
  const uint32_t id = found->second;
  const auto count = static_cast<int64_t>(chunks_[id].tokens.size());
  const int64_t starts = std::min(kStartOffsets, count - min_match_ + 1);
  for (int64_t offset = 0; offset < starts; ++offset) {
    erase_suffix({id, static_cast<uint32_t>(offset)});
  }
  chunks_[id] = {};
  free_chunks_.push_back(id);
  by_key_.erase(found);
  return true;
}

bool ChunkIndex::contains(const std::string& key) const {
  const std::shared_lock lock(mutex_);
  return by_key_.contains(key);
}

int64_t ChunkIndex::size() const {
  const std::shared_lock lock(mutex_);
  return static_cast<int64_t>(by_key_.size());
}

int64_t ChunkIndex::nbytes() const {
  const std::shared_lock lock(mutex_);
  const auto bytes_of = [](const auto& vector) {
    return vector.capacity() * sizeof(*vector.data());
  };
  size_t bytes = bytes_of(powers_) + bytes_of(chunks_) + bytes_of(free_chunks_) +
                 bytes_of(buckets_) + bytes_of(free_buckets_) + bytes_of(slots_);
  for (const Chunk& chunk : chunks_) {
    // The key is held twice, the second time in a node of the hash map.
    bytes += bytes_of(chunk.tokens) + bytes_of(chunk.prefix_hashes) + 2 * chunk.key.capacity();
  }
  for (const Bucket& bucket : buckets_) bytes += bytes_of(bucket);
  bytes += by_key_.size() * (sizeof(std::pair<std::string, uint32_t>) + 2 * sizeof(void*)) +
           by_key_.bucket_count() * sizeof(void*);
  return static_cast<int64_t>(bytes);
}

// Tokens that prompt[begin, begin + length) and the suffix have in common at their start, of which
// `known` are known to be equal. More than the truth if two texts collide, never less.
int64_t ChunkIndex::common_prefix(const Prompt& prompt, int64_t begin, Suffix suffix, int64_t known,
                                  int64_t length) const {
  const Chunk& chunk = chunks_[suffix.chunk];
  const int64_t limit = std::min(length, static_cast<int64_t>(chunk.tokens.size()) - suffix.offset);
  const int32_t* a = prompt.tokens.data() + begin;
  const int32_t* b = chunk.tokens.data() + suffix.offset;
  const int64_t direct = std::min(limit, known + kDirectTokens);
  for (int64_t i = known; i < direct; ++i) {
    if (a[i] != b[i]) return i;
  }
  const auto equal = [&](int64_t count) {
    return range_hash(prompt.prefix_hashes.data(), begin, count) ==
           range_hash(chunk.prefix_hashes.data(), suffix.offset, count);
  };
  if (direct == limit || equal(limit)) return limit;
  int64_t low = direct;  // equal
  int64_t high = limit;  // different
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (equal(middle) ? low : high) = middle;
  }
  return low;
}

// The first suffix of sorted [first, last) that is not less than prompt[begin, begin + length).
ChunkIndex::Position ChunkIndex::lower_bound(const Prompt& prompt, int64_t begin, int64_t length,
                                             const Suffix* first, const Suffix* last) const {
  Position position;
  int64_t common_low = 0;
  int64_t common_high = 0;
  while (first != last) {
    const Suffix* middle = first + (last - first) / 2;
    // Everything between two suffixes shares what both have in common with the text.
    const int64_t known = std::min(common_low, common_high);
    const int64_t common = common_prefix(prompt, begin, *middle, known, length);
    const std::vector<int32_t>& tokens = chunks_[middle->chunk].tokens;
    const size_t next = middle->offset + static_cast<size_t>(common);
    const bool is_less =
        common < length && (next == tokens.size() || tokens[next] < prompt.tokens[begin + common]);
    if (is_less) {
      first = middle + 1;
      common_low = position.before = common;
    } else {
      last = middle;
      common_high = position.after = common;
    }
  }
  position.at = first;
  return position;
}

// The longest run from prompt token `begin` on; empty (begin == end) if there is none.
ChunkIndex::Run ChunkIndex::longest_run(const Prompt& prompt, int64_t begin,
                                        const Bucket& bucket) const {
  Run run{begin, begin, {}, false};
  const Suffix* first = bucket.data();
  const Suffix* const end = bucket.data() + bucket.size();
  while (first != end) {
    const uint32_t offset = first->offset;
    const Suffix* last =
        std::partition_point(first, end, [=](Suffix suffix) { return suffix.offset == offset; });
    const Position position = lower_bound(prompt, begin, prompt.size() - begin, first, last);
    const int64_t length = std::max(position.before, position.after);
    if (length >= min_match_ && length > run.end - run.begin) {
      // The first suffix that begins with these tokens; it is the shortest one.
      const Position shortest = lower_bound(prompt, begin, length, first, last);
      if (shortest.at != last) {
        run.end = begin + length;
        run.suffix = *shortest.at;
        run.whole =
            offset == 0 && chunks_[run.suffix.chunk].tokens.size() == static_cast<size_t>(length);
      }
    }
    first = last;
  }
  return run;
}

// Runs, in order of their beginnings, become matches.
std::vector<ChunkIndex::Run> ChunkIndex::select(const Prompt& prompt,
                                                const std::vector<Run>& runs) const {
  std::vector<Run> matches;
  const Run* farthest = nullptr;
  auto next = runs.begin();
  int64_t position = 0;
  while (true) {
    for (; next != runs.end() && next->begin <= position; ++next) {
      if (!farthest || next->end > farthest->end) farthest = &*next;
    }
    if (!farthest || farthest->end - position < min_match_) {
      if (next == runs.end()) return matches;
      position = next->begin;
      continue;
    }
    Run match = *farthest;
    if (match.begin < position && match.whole && !matches.empty() && !matches.back().whole &&
        matches.back().begin < match.begin) {
      Run& previous = matches.back();
      previous.end = std::min(previous.end, match.begin);
      if (previous.end - previous.begin < min_match_) matches.pop_back();
    } else if (match.begin < position) {
      match.suffix.offset += static_cast<uint32_t>(position - match.begin);
      match.begin = position;
      match.whole = false;
    }
    const int32_t* text = prompt.tokens.data();
    const int32_t* chunk = chunks_[match.suffix.chunk].tokens.data() + match.suffix.offset;
    const int32_t* difference = std::mismatch(text + match.begin, text + match.end, chunk).first;
    if (difference != text + match.end) {  // two hashes collided
      match.end = difference - text;
      match.whole = false;
    }
    if (match.end - match.begin >= min_match_) {
      matches.push_back(match);
      position = match.end;
    } else {
      ++position;
    }
  }
}

std::vector<ChunkMatch> ChunkIndex::find(std::span<const int32_t> tokens) const {
  std::vector<ChunkMatch> found;
  const auto count = static_cast<int64_t>(tokens.size());
  if (count < min_match_) return found;

  const std::shared_lock lock(mutex_);
  if (by_key_.empty()) return found;
  const Prompt prompt{tokens, prefix_hashes(tokens)};
  std::vector<Run> runs;
  for (int64_t begin = 0; begin + min_match_ <= count; ++begin) {
    const uint64_t fingerprint = range_hash(prompt.prefix_hashes.data(), begin, min_match_);
    const Slot& slot = slots_[find_slot(fingerprint)];
    if (slot.fingerprint == kEmpty) continue;
    const Run run = longest_run(prompt, begin, buckets_[slot.bucket]);
    if (run.end > run.begin) runs.push_back(run);
  }
  for (const Run& match : select(prompt, runs)) {
    found.push_back({chunks_[match.suffix.chunk].key, match.begin, match.end, match.suffix.offset});
  }
  return found;
}

}  // namespace phasekv::reuse
