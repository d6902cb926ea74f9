#include "phasekv/error.h"

#include <utility>

namespace phasekv {

namespace {

const char* before_reason(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return ": expected ";
    case ErrorCode::unsupported:
      return " is not supported: ";
    case ErrorCode::missing_capability:
      return " is not available: ";
  }
  return ": ";
}

std::string message_of(ErrorCode code, const std::string& argument, const std::string& value,
                       const std::string& reason) {
  std::string message = argument;
  message.append(" = ").append(value).append(before_reason(code)).append(reason);
  return message;
}

}  // namespace

Error::Error(ErrorCode code, std::string argument, std::string value, std::string reason)
    : std::runtime_error(message_of(code, argument, value, reason)),
      code_(code),
      argument_(std::move(argument)),
      value_(std::move(value)),
      reason_(std::move(reason)) {}

}  // namespace phasekv
