// Histograms as Python has them.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>

#include "metrics.h"

namespace engram {

// (counts, sum in ns); a count is of its bucket alone.
inline nanobind::tuple histogram(const Histogram& from) {
  nanobind::list counts;
  for (const std::uint64_t count : from.counts()) counts.append(count);
  return nanobind::make_tuple(counts, from.sum_ns());
}

inline bool is_empty(const Histogram& histogram) {
  const auto counts = histogram.counts();
  return std::ranges::all_of(counts, [](std::uint64_t count) { return count == 0; });
}

}  // namespace engram
