// Values to bytes and back, for states that are carried to another process of the same machine
// type. Reading past the end throws instead.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "phasekv/error.h"

namespace phasekv::eviction {

class ByteWriter {
 public:
  template <typename T>
  void array(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    number(static_cast<int64_t>(values.size()));
    append(values.data(), values.size_bytes());
  }

  template <typename T>
  void number(T value) {
    append(&value, sizeof(value));
  }

  template <typename T>
  void numbers(std::initializer_list<T> values) {
    for (const T value : values) number(value);
  }

  void text(std::string_view text) { array(std::span<const char>(text.data(), text.size())); }

  std::vector<uint8_t> take() { return std::move(bytes_); }

 private:
  void append(const void* data, size_t size) {
    const auto* from = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), from, from + size);
  }

  std::vector<uint8_t> bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, read(sizeof(T)), sizeof(T));
    return value;
  }

  template <typename T>
  std::vector<T> array() {
    const auto count = number<int64_t>();
    if (count < 0 || static_cast<uint64_t>(count) > bytes_.size() / sizeof(T)) fail(count);
    std::vector<T> values(static_cast<size_t>(count));
    if (count > 0)
      std::memcpy(values.data(), read(values.size() * sizeof(T)), values.size() * sizeof(T));
    return values;
  }

  std::string text() {
    const std::vector<char> characters = array<char>();
    return {characters.begin(), characters.end()};
  }

  void end() const {
    if (at_ != bytes_.size()) fail(static_cast<int64_t>(bytes_.size()));
  }

 private:
  const uint8_t* read(size_t size) {
    if (size > bytes_.size() - at_) fail(static_cast<int64_t>(size));
    const uint8_t* data = bytes_.data() + at_;
    at_ += size;
    return data;
  }

  [[noreturn]] static void fail(int64_t size) {
    throw Error(ErrorCode::invalid_argument, "state", std::to_string(size) + " bytes or entries",
                "as many as were written");
  }

  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
};

}  // namespace phasekv::eviction
