// Results of the benchmarks of the ops, as lines to read and as JSON.
#pragma once

#include <string>
#include <vector>

#include "comparison.h"

namespace phasekv::benchmarks {

// The machine and the columns.
void print_header();
void print(const Result& result);

// Ends the program if the file cannot be written.
void write_json(const std::string& path, const std::vector<Result>& results);

}  // namespace phasekv::benchmarks
