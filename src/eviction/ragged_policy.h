// Policies that score as another one does and divide the budget in their own way.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "phasekv/eviction/policy.h"

namespace phasekv::eviction {

class RaggedPolicy : public Policy {
 public:
  // `name` must outlive the policy.
  RaggedPolicy(std::string_view name, std::unique_ptr<Policy> scores)
      : name_(name), scores_(std::move(scores)) {}

  std::string_view name() const override { return name_; }
  PolicyNeeds needs() const override { return scores_->needs(); }
  ProtectedTokens protected_tokens(int64_t budget) const override {
    return scores_->protected_tokens(budget);
  }
  double phase_quota() const override { return scores_->phase_quota(); }
  void score(const PolicyInput& input, std::span<float> scores) const override {
    scores_->score(input, scores);
  }
  bool is_ragged() const override { return true; }

 private:
  std::string_view name_;
  std::unique_ptr<Policy> scores_;
};

}  // namespace phasekv::eviction
