#include "phasekv/error.h"

#include <utility>

namespace phasekv {

Error::Error(ErrorCode code, std::string argument, std::string value, const std::string& reason)
    : std::runtime_error(argument + " = " + value + ": " + reason),
      code_(code),
      argument_(std::move(argument)),
      value_(std::move(value)) {}

}  // namespace phasekv
