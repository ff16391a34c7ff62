// One request of a client on its way: read, then block by block submitted, awaited and gathered
// into the client's memory. In steps of about a millisecond, so that others get their turn.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "metrics.h"
#include "shm_serving.h"
#include "shm_tap.h"

namespace engram::shm {

using Clock = std::chrono::steady_clock;

// What all clients of a server share.
struct Totals {
  std::atomic<std::uint64_t> requests{0};
  // Of these, not answered with rows, by Status; the first stays 0.
  std::array<std::atomic<std::uint64_t>, kStatuses> failures{};
  LookupMetrics lookups;
  Tap tap;
};

// What the works of one client share. Of its thread alone, but for `ring`.
struct Scope {
  Serving& serving;
  const Limits& limits;
  Totals& totals;
  std::span<std::byte> data;     // of the client
  std::function<void()> ring{};  // wakes its thread, from any other

  std::shared_ptr<Quota> quota = std::make_shared<Quota>();
  std::uint64_t held_rows = 0;  // of works that have read their keys
  // Of blocks the engine has, those given up among them until their last read has ended.
  std::shared_ptr<std::atomic<std::uint64_t>> submitted_bytes =
      std::make_shared<std::atomic<std::uint64_t>>(0);
};

class Work {
 public:
  enum class Step { did, waits, over };

  // Takes note of a request; nothing of the client's memory is looked at yet. Throws Refusal.
  Work(Scope& scope, const Entry& entry);
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // Does the next piece. `over`: the outcome says how it ended, and the rows are in place.
  Step step();
  // Ends it from outside; what is being read for it is given up.
  void end(Status status, const std::string& sentence);
  // When to call step() again though nothing has rung.
  Clock::time_point look_again() const;

  Lane lane() const { return lane_; }
  Format format() const { return static_cast<Format>(entry_.format); }
  std::int64_t began_ns() const { return began_ns_; }
  const Entry& entry() const { return entry_; }

  struct Outcome {
    Status status = Status::ok;
    std::string sentence{};
    std::uint32_t retry_after_ms = 0;  // resource_exhausted: when to come back; 0: nobody knows
    std::uint64_t payload_bytes = 0;
    std::uint32_t row_bytes = 0;
    BatchStats stats{};
  };
  const Outcome& outcome() const { return outcome_; }

 private:
  struct Block {
    std::shared_ptr<Batch> batch;
    std::size_t count;     // positions
    std::size_t done = 0;  // of these, gathered
    bool checked = false;  // its files were looked at after its reads
  };

  Step advance();
  Step start();
  bool admit();
  std::vector<LayerKeys> next_keys() const;
  void ensure_unwritten() const;
  bool copy_hits();
  Step submit();
  Step gather();
  std::function<void()> on_done(std::uint64_t bytes) const;
  void settle();
  void finish();
  bool late() const { return deadline_ && Clock::now() >= *deadline_; }
  std::uint64_t block_bytes(std::size_t positions) const;

  Scope& scope_;
  const std::shared_ptr<const Served> served_;
  Entry entry_;
  std::int64_t began_ns_ = now_ns();
  std::uint64_t rows_;
  Lane lane_;
  std::optional<Clock::time_point> deadline_;
  std::shared_ptr<Admission> admission_;
  std::shared_ptr<const Request> request_;
  std::size_t block_positions_ = 0;
  std::size_t submitted_ = 0;  // positions
  std::size_t gathered_ = 0;
  std::size_t not_all_hits_ = 0;  // 1 + where the last block began that the cache did not have
  std::deque<Block> blocks_;
  bool waits_for_admission_ = false;
  std::optional<Clock::time_point> waits_for_budget_until_;
  Outcome outcome_;
};

}  // namespace engram::shm
