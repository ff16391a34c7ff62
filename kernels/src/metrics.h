// What readers and engines count for those who run them: written in passing, read at leisure. The
// numbers of one object are read one by one, and may differ by what happened meanwhile.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "format.h"
#include "read.h"

namespace engram {

// On the clock that all latencies are measured by.
inline std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Durations by size. The buckets are for NVMe: close together from what a drive takes when idle to
// what it takes when busy, and up to what makes a user complain.
class Histogram {
 public:
  // Upper bounds, inclusive; what is above the last has a bucket of its own.
  static constexpr std::array<std::int64_t, 20> kBoundsUs{
      10,    20,    50,    75,     100,    150,    200,     300,     500,     750,
      1'000, 2'000, 5'000, 10'000, 20'000, 50'000, 100'000, 200'000, 500'000, 1'000'000};
  static constexpr std::size_t kBuckets = kBoundsUs.size() + 1;

  void add(std::int64_t ns, std::uint64_t times = 1) {
    constexpr auto relaxed = std::memory_order_relaxed;
    ns = std::max<std::int64_t>(ns, 0);
    const auto* const bound = std::ranges::lower_bound(kBoundsUs, (ns + 999) / 1000);
    counts_[static_cast<std::size_t>(bound - kBoundsUs.begin())].fetch_add(times, relaxed);
    sum_ns_.fetch_add(static_cast<std::uint64_t>(ns) * times, relaxed);
  }

  std::array<std::uint64_t, kBuckets> counts() const {
    std::array<std::uint64_t, kBuckets> counts;
    for (std::size_t i = 0; i < kBuckets; ++i) counts[i] = counts_[i].load();
    return counts;
  }
  std::uint64_t sum_ns() const { return sum_ns_.load(); }

 private:
  std::array<std::atomic<std::uint64_t>, kBuckets> counts_{};
  std::atomic<std::uint64_t> sum_ns_{0};
};

// How long lookups took that were answered with rows.
class LookupMetrics {
 public:
  Histogram& answered(Lane lane, Format format) { return answered_[place(lane, format)]; }
  const Histogram& answered(Lane lane, Format format) const {
    return answered_[place(lane, format)];
  }

 private:
  static std::size_t place(Lane lane, Format format) {
    return static_cast<std::size_t>(lane) * kFormats + static_cast<std::size_t>(format);
  }

  std::array<Histogram, kLanes * kFormats> answered_;
};

// What it takes to hand rows over: copied out of memory, and converted unless they stay packed.
class ConvertMetrics {
 public:
  struct Total {
    std::uint64_t ns = 0;
    std::uint64_t bytes = 0;  // of what was written
  };

  void add(Format format, std::int64_t ns, std::uint64_t bytes) {
    Counts& counts = counts_[static_cast<std::size_t>(format)];
    counts.ns.fetch_add(static_cast<std::uint64_t>(ns), std::memory_order_relaxed);
    counts.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  Total total(Format format) const {
    const Counts& counts = counts_[static_cast<std::size_t>(format)];
    return {.ns = counts.ns.load(), .bytes = counts.bytes.load()};
  }

 private:
  // Threads that gather in different formats do not wait for each other's line.
  struct alignas(64) Counts {
    std::atomic<std::uint64_t> ns{0};
    std::atomic<std::uint64_t> bytes{0};
  };
  std::array<Counts, kFormats> counts_;
};

// Where the time of reads goes.
class ReadMetrics {
 public:
  explicit ReadMetrics(std::size_t files)
      : files_(files), device_(new Histogram[files * kTables * kLanes]) {}

  // From submission to completion, retries included, of reads of one table in one file.
  Histogram& device(std::uint32_t file, std::uint16_t table, Lane lane) {
    return device_[place(file, table, lane)];
  }
  const Histogram& device(std::uint32_t file, std::uint16_t table, Lane lane) const {
    return device_[place(file, table, lane)];
  }
  // From when a request's reads could be taken until each was.
  Histogram& queued(Lane lane) { return queued_[static_cast<std::size_t>(lane)]; }
  const Histogram& queued(Lane lane) const { return queued_[static_cast<std::size_t>(lane)]; }

  std::size_t files() const { return files_; }
  // Tables told apart: those of an engine, and reads that are of none as the last.
  static constexpr std::uint16_t kTables = 9;

 private:
  static std::size_t place(std::uint32_t file, std::uint16_t table, Lane lane) {
    const std::size_t known = std::min<std::uint16_t>(table, kTables - 1);
    return (file * std::size_t{kTables} + known) * kLanes + static_cast<std::size_t>(lane);
  }

  std::size_t files_;
  std::unique_ptr<Histogram[]> device_;
  std::array<Histogram, kLanes> queued_;
};

}  // namespace engram
