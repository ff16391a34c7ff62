// Whether anybody still waits for a piece of work.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>

namespace engram {

class Wanted {
 public:
  // Before others see it.
  void set_deadline(std::chrono::nanoseconds from_now) {
    deadline_ns_ = now_ns() + from_now.count();
  }

  void drop() { dropped_.store(true, std::memory_order_relaxed); }
  // 0 while it is wanted; then ECANCELED or ETIMEDOUT.
  std::int32_t why_not() const {
    if (dropped_.load(std::memory_order_relaxed)) return ECANCELED;
    return deadline_ns_ != kNever && now_ns() > deadline_ns_ ? ETIMEDOUT : 0;
  }

 private:
  static constexpr std::int64_t kNever = 0;
  static std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  std::atomic<bool> dropped_{false};
  std::int64_t deadline_ns_ = kNever;
};

}  // namespace engram
