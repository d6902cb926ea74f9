// Speed of the ops, each against what bounds it, measured in the same run and turn by turn: moves
// against memcpy of as many bytes, products against dot products in the closest cache.
//
//   ops_benchmark [--json PATH] [--filter TEXT] [--seconds S] [--threads N]
//
// Every call works on the next of many layers, as a prefill or an eviction does. Of the times the
// median counts; the spread is that of the middle 80 %. "lines" is the share where whole cache
// lines are counted instead of the bytes that are wanted of them.
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "comparison.h"
#include "copy_workload.h"
#include "eviction_workload.h"
#include "report.h"

namespace phasekv::benchmarks {
namespace {

struct Options {
  std::string json;
  std::string filter;
  double seconds = 0.5;
};

void run(Workload& workload, const Options& options, std::vector<Result>& results) {
  for (const Op& op : workload.ops()) {
    if (op.name.find(options.filter) == std::string::npos) continue;
    results.push_back(compare(op, options.seconds, workload));
    print(results.back());
  }
}

int run_all(const Options& options) {
  std::vector<Result> results;
  print_header();
  for (const Shape& shape : copy_shapes()) run(*make_copy_workload(shape), options, results);
  for (const Shape& shape : eviction_shapes()) {
    run(*make_eviction_workload(shape), options, results);
  }
  if (!options.json.empty()) write_json(options.json, results);
  return 0;
}

}  // namespace
}  // namespace phasekv::benchmarks

int main(int argc, char** argv) {
  phasekv::benchmarks::Options options;
  omp_set_num_threads(1);
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    const std::string value = i + 1 < argc ? argv[i + 1] : "";
    if (option == "--json" && !value.empty()) {
      options.json = value;
    } else if (option == "--filter" && !value.empty()) {
      options.filter = value;
    } else if (option == "--seconds" && !value.empty()) {
      options.seconds = std::atof(value.c_str());
    } else if (option == "--threads" && !value.empty()) {
      omp_set_num_threads(std::max(1, std::atoi(value.c_str())));
    } else {
      std::cerr << "usage: ops_benchmark [--json PATH] [--filter TEXT] [--seconds S] "
                   "[--threads N]\n";
      return 2;
    }
  }
  return phasekv::benchmarks::run_all(options);
}
