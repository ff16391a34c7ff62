// Requests that were taken up, for whoever records them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "shm_request.h"

namespace engram::shm {

// Safe to share between threads. Noting a request takes its keys over; nothing is copied.
class Tap {
 public:
  struct Noted {
    std::int64_t at_ns = 0;  // of CLOCK_MONOTONIC: when it was let in, as gRPC's are noted
    Lane lane{};
    Entry entry{};
    std::shared_ptr<const Request> request{};
    std::shared_ptr<const void> room{};  // what it takes of the bytes that may wait
  };
  struct Taken {
    std::vector<Noted> noted{};  // in the order they were noted
    std::uint64_t missing = 0;   // for want of room, since the last time
  };

  // Notes requests from now on, as long as no more bytes of keys than these wait to be dropped. 0:
  // none, as at first.
  void allow(std::uint64_t bytes) { allowed_bytes_.store(bytes); }
  void note(std::int64_t at_ns, Lane lane, const Entry& entry,
            const std::shared_ptr<const Request>& request) noexcept;
  // What was noted since the last time.
  Taken take();

 private:
  std::atomic<std::uint64_t> allowed_bytes_{0};
  // Outlives the tap for as long as something that was noted does.
  const std::shared_ptr<std::atomic<std::uint64_t>> waiting_bytes_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
  std::mutex mutex_;
  Taken waiting_;
};

}  // namespace engram::shm
