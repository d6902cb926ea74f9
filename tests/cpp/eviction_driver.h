// Requests whose tokens are computed step by step, as an engine does it, under any policy, in
// caches of any look and wherever an evictor's backend has its tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "buffers.h"
#include "phasekv/eviction/backend.h"
#include "phasekv/eviction/evictor.h"
#include "phasekv/eviction/policy.h"
#include "phasekv/phases/marker_automaton.h"

namespace phasekv::eviction {

struct Setting {
  std::string policy;
  int64_t budget = 64;
  int64_t stride = 16;
  PolicyOptions options = {};

  Window window() const { return {.budget = budget, .stride = stride}; }
};

// One for each policy that is not ragged, and one with many options.
std::vector<Setting> eviction_settings();

// How queries and caches look.
struct TensorShape {
  std::string layout = "vec";
  DataType dtype = DataType::float32;
  int64_t query_heads = 4;
  int64_t kv_heads = 2;
  int64_t head_size = 32;
  RowsOrder query_order = RowsOrder::packed;
};

class EvictionDriver {
 public:
  static constexpr int64_t kLayers = 2;
  static constexpr int64_t kBlockSize = 16;
  static constexpr int64_t kRequest = 7;  // number of the first request

  // Equal seeds give equal tokens, and equal block seeds the same blocks.
  EvictionDriver(const Setting& setting, uint32_t seed, uint32_t block_seed,
                 const TensorShape& shape = {}, std::shared_ptr<Backend> backend = cpu_backend(),
                 int64_t requests = 1);

  Evictor& evictor() { return evictor_; }
  // Statistics are made up for a policy that needs them.
  std::shared_ptr<const Policy> policy() const { return policy_; }
  int64_t computed(int64_t request = kRequest) const;

  // The evictor forgets a request and has it anew, with nothing computed.
  void add(int64_t request = kRequest);

  // Computes so many more tokens of the only request, or of each.
  std::vector<EvictionReport> step(int64_t count);
  std::vector<EvictionReport> step(const std::vector<int64_t>& counts);

  // Every held key and value is the one of the position that the evictor names, bit for bit.
  void expect_consistent() const;

  // Of each layer and KV head.
  std::vector<std::set<int32_t>> held_positions(int64_t request = kRequest) const;

  // Row `position` of the keys (0), values (1) or queries (2) of a layer, as the dtype has it: a
  // function of the seed alone.
  oracle::Row row(int what, int64_t layer, int64_t request, int64_t position, int64_t head) const;

 private:
  struct Request {
    std::vector<int32_t> block_table;
    int64_t computed = 0;
  };
  // The cache of a layer, and where the backend has it.
  struct Layer {
    CacheBuffer here;
    TensorMemory there;
  };

  int64_t request_number(size_t index) const { return kRequest + static_cast<int64_t>(index); }
  static int64_t slot(const Request& request, int64_t position);
  void write_cache(Layer& layer, int64_t index, const std::vector<int64_t>& counts);
  RowsBuffer queries(int64_t layer, const std::vector<int64_t>& counts) const;
  void poison_freed();

  Setting setting_;
  TensorShape shape_;
  uint32_t seed_;
  std::shared_ptr<Backend> backend_;
  std::shared_ptr<const Policy> policy_;
  std::shared_ptr<const phases::MarkerAutomaton> markers_;
  Evictor evictor_;
  std::vector<Request> requests_;
  std::vector<Layer> layers_;
};

}  // namespace phasekv::eviction
