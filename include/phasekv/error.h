// One exception type for the whole core: a code, the argument's name and its value.
#pragma once

#include <stdexcept>
#include <string>

namespace phasekv {

enum class ErrorCode {
  invalid_argument,  // a bad value; Python sees a ValueError
  unsupported,  // a model, layout or engine feature that is refused; Python: NotImplementedError
  missing_capability,  // this machine or build lacks what was asked for; Python: RuntimeError
};

class Error : public std::runtime_error {
 public:
  // `argument` is the name the caller used, `value` what it passed. `reason` is what would have
  // been right ("at least 1") for an invalid argument, else why it cannot be had.
  Error(ErrorCode code, std::string argument, std::string value, std::string reason);

  ErrorCode code() const noexcept { return code_; }
  const std::string& argument() const noexcept { return argument_; }
  const std::string& value() const noexcept { return value_; }
  const std::string& reason() const noexcept { return reason_; }

 private:
  ErrorCode code_;
  std::string argument_;
  std::string value_;
  std::string reason_;
};

}  // namespace phasekv
