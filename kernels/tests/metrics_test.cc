// Which bucket a duration falls into, and that nothing is lost when many threads count.
#include "metrics.h"

#include <doctest/doctest.h>

#include <numeric>
#include <thread>
#include <vector>

namespace engram::test {
namespace {

// The bucket that one duration was counted in.
std::size_t bucket_of(std::int64_t ns) {
  Histogram histogram;
  histogram.add(ns);
  const auto counts = histogram.counts();
  std::size_t bucket = 0;
  while (bucket < counts.size() && counts[bucket] == 0) ++bucket;
  REQUIRE(bucket < counts.size());
  REQUIRE(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}) == 1);
  return bucket;
}

}  // namespace

TEST_CASE("bounds ascend, and belong to their own bucket") {
  for (std::size_t i = 0; i < Histogram::kBoundsUs.size(); ++i) {
    const std::int64_t bound_ns = Histogram::kBoundsUs[i] * 1000;
    CHECK(bucket_of(bound_ns) == i);
    CHECK(bucket_of(bound_ns - 1) == i);
    CHECK(bucket_of(bound_ns + 1) == i + 1);
    if (i > 0) CHECK(Histogram::kBoundsUs[i] > Histogram::kBoundsUs[i - 1]);
  }
  CHECK(bucket_of(0) == 0);
  CHECK(bucket_of(-5) == 0);  // a clock that went backwards
  CHECK(bucket_of(std::int64_t{1} << 60) == Histogram::kBuckets - 1);
}

TEST_CASE("sums and counts of many threads are whole") {
  Histogram histogram;
  constexpr unsigned kThreads = 4;
  constexpr unsigned kTimes = 20'000;
  {
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        for (unsigned i = 0; i < kTimes; ++i) histogram.add(i, 2);
      });
    }
  }
  const auto counts = histogram.counts();
  CHECK(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}) == 2 * kThreads * kTimes);
  CHECK(histogram.sum_ns() == std::uint64_t{kThreads} * kTimes * (kTimes - 1));
}

TEST_CASE("files, tables and lanes are counted apart, tables beyond those known together") {
  ReadMetrics metrics(2);
  for (std::uint32_t file = 0; file < 2; ++file) {
    for (std::uint16_t table = 0; table < ReadMetrics::kTables; ++table) {
      for (const Lane lane : kAllLanes) {
        metrics.device(file, table, lane)
            .add(1000, file * 100 + table * 10 + static_cast<unsigned>(lane) + 1);
      }
    }
  }
  for (std::uint32_t file = 0; file < 2; ++file) {
    for (std::uint16_t table = 0; table < ReadMetrics::kTables; ++table) {
      for (const Lane lane : kAllLanes) {
        CHECK(metrics.device(file, table, lane).counts()[0] ==
              file * 100 + table * 10 + static_cast<unsigned>(lane) + 1);
      }
    }
  }
  const std::uint64_t before = metrics.device(1, kNoTable, Lane::decode).counts()[0];
  metrics.device(1, 100, Lane::decode).add(1000);
  CHECK(metrics.device(1, kNoTable, Lane::decode).counts()[0] == before + 1);
}

TEST_CASE("lookups are counted by lane and format, conversions by format") {
  LookupMetrics lookups;
  ConvertMetrics converted;
  std::uint64_t number = 0;
  for (const Lane lane : kAllLanes) {
    for (const Format format : kAllFormats) {
      lookups.answered(lane, format).add(1000, ++number);
      converted.add(format, 7, number);
    }
  }
  number = 0;
  for (const Lane lane : kAllLanes) {
    for (const Format format : kAllFormats) {
      CHECK(lookups.answered(lane, format).counts()[0] == ++number);
    }
  }
  for (std::uint64_t i = 0; i < kFormats; ++i) {
    const ConvertMetrics::Total total = converted.total(kAllFormats[i]);
    CHECK(total.ns == 7 * kLanes);
    CHECK(total.bytes == (i + 1) + (i + 5) + (i + 9));
  }
}

}  // namespace engram::test
