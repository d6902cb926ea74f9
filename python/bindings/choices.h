// Names from Python as values of an enum.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "phasekv/error.h"

namespace phasekv::bindings {

// None stays empty; a name that is not known is refused with all that are.
template <class Value, size_t N>
std::optional<Value> parse_choice(const char* argument, const std::optional<std::string>& name,
                                  const std::pair<const char*, Value> (&known)[N]) {
  if (!name) return std::nullopt;
  std::string names;
  for (const auto& [candidate, value] : known) {
    if (*name == candidate) return value;
    names += (names.empty() ? "" : ", ") + std::string(candidate);
  }
  throw Error(ErrorCode::invalid_argument, argument, *name, "one of " + names);
}

}  // namespace phasekv::bindings
