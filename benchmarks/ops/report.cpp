#include "report.h"

#include <omp.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>

#include "phasekv/cpu.h"

namespace phasekv::benchmarks {
namespace {

std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

const char* name_of(DataType dtype) {
  switch (dtype) {
    case DataType::float32:
      return "float32";
    case DataType::bfloat16:
      return "bfloat16";
    case DataType::float16:
      return "float16";
  }
  return "unknown";
}

const char* name_of(Bound bound) { return bound == Bound::memcpy ? "memcpy" : "dot products"; }
const char* unit_of(Bound bound) { return bound == Bound::memcpy ? "GB/s" : "GFLOP/s"; }

std::string instruction_set() { return std::string(name_of(active_cpu_isa())); }

long long printable(int64_t x) { return static_cast<long long>(x); }

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f %%", 100.0 * share);
  return text;
}

}  // namespace

void print_header() {
  std::printf("%s, %d threads, %s\n", processor().c_str(), omp_get_max_threads(),
              instruction_set().c_str());
  std::printf("%-22s %-10s %6s %5s %7s %7s %4s %5s %-8s %10s %8s %8s %8s %8s %8s %-7s %6s %6s\n",
              "op", "adjacent", "tokens", "kept", "queries", "heads", "size", "block", "dtype",
              "bytes|FLOP", "ms", "10 %", "90 %", "rate", "bound", "", "share", "lines");
}

void print(const Result& result) {
  const Shape& shape = result.shape;
  std::printf(
      "%-22s %-10s %6lld %5lld %7lld %3lld x %lld %4lld %5lld %-8s %10.3g %8.3f %8.3f %8.3f"
      " %8.2f %8.2f %-7s %6s %6s\n",
      result.op.c_str(), result.adjacent.c_str(), printable(shape.tokens), printable(shape.kept),
      printable(shape.queries), printable(shape.kv_heads), printable(shape.group),
      printable(shape.head_size), printable(shape.block_size), name_of(shape.dtype), result.work,
      result.milliseconds, result.percentile_10, result.percentile_90, result.rate,
      result.bound_rate, unit_of(result.bound), percent(result.share()).c_str(),
      result.line_bytes > 0.0 ? percent(result.line_share()).c_str() : "");
  std::fflush(stdout);
}

void write_json(const std::string& path, const std::vector<Result>& results) {
  std::ofstream out(path);
  out << "{\n  \"machine\": {\"processor\": \"" << processor()
      << "\", \"cores\": " << sysconf(_SC_NPROCESSORS_ONLN) << ", \"instruction_set\": \""
      << instruction_set() << "\"},\n  \"threads\": " << omp_get_max_threads()
      << ",\n  \"clock\": \"" << (omp_get_max_threads() == 1 ? "processor time" : "wall clock")
      << "\",\n  \"rows\": [\n";
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& result = results[i];
    const Shape& shape = result.shape;
    const bool moves_bytes = result.bound == Bound::memcpy;
    out << "    {\"op\": \"" << result.op << "\", \"adjacent\": \"" << result.adjacent
        << "\", \"tokens\": " << shape.tokens << ", \"kept\": " << shape.kept
        << ", \"queries\": " << shape.queries << ", \"kv_heads\": " << shape.kv_heads
        << ", \"group\": " << shape.group << ", \"head_size\": " << shape.head_size
        << ", \"block_size\": " << shape.block_size << ", \"dtype\": \"" << name_of(shape.dtype)
        << "\", \"" << (moves_bytes ? "bytes" : "flop") << "\": " << result.work
        << ", \"milliseconds\": " << result.milliseconds << ", \"milliseconds_spread\": ["
        << result.percentile_10 << ", " << result.percentile_90 << "], \"rate\": " << result.rate
        << ", \"unit\": \"" << unit_of(result.bound) << "\", \"bound\": \"" << name_of(result.bound)
        << "\", \"bound_rate\": " << result.bound_rate << ", \"share\": " << result.share()
        << ", \"line_share\": ";
    if (result.line_bytes > 0.0) {
      out << result.line_share();
    } else {
      out << "null";
    }
    out << "}" << (i + 1 < results.size() ? "," : "") << "\n";
  }
  out << "  ]\n}\n";
  if (!out.flush()) {
    std::cerr << "cannot write " << path << "\n";
    std::exit(1);
  }
}

}  // namespace phasekv::benchmarks
