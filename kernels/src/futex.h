// Sleeping on a word of memory that processes share.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace engram {

// Returns when the word no longer has the value, when it is woken, after `at_most`, or for no
// reason: look again.
inline void futex_wait(std::uint32_t& word, std::uint32_t value, std::chrono::nanoseconds at_most) {
  if (at_most.count() <= 0) return;
  const timespec timeout{.tv_sec = static_cast<std::time_t>(at_most.count() / 1'000'000'000),
                         .tv_nsec = static_cast<long>(at_most.count() % 1'000'000'000)};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

inline void futex_wake(std::uint32_t& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void spin_hint() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace engram
