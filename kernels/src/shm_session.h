// One attached client: the thread that takes its requests off the ring and works on them.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "shm_memory.h"
#include "shm_work.h"

namespace engram::shm {

// What wakes a session's thread. The word it sleeps on is the client's to write as well: a client
// that tampers with it makes its own session sleep for up to a second too long.
class Bell {
 public:
  explicit Bell(Memory memory) : memory_(std::move(memory)) {}

  const Memory& memory() const { return memory_; }
  // From any thread.
  void ring();
  // By the session's thread: returns at once when `news()` or ring() was called since clear().
  void clear() { rung_.store(false); }
  void sleep(const std::function<bool()>& news, Clock::time_point until,
             std::chrono::nanoseconds spin);

 private:
  Memory memory_;
  std::atomic<bool> rung_{false};
  std::atomic<bool> asleep_{false};
};

class Session {
 public:
  // `on_end` is called by the session's thread when it is about to end.
  Session(Serving& serving, const Limits& limits, Totals& totals, Memory memory,
          std::function<void()> on_end);
  // Waits for the thread.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Throws std::system_error when no thread can be had.
  void start();
  // New requests are refused from now on.
  void drain();
  // The server ends: ends the thread; what is under way is given up.
  void stop();
  // The same, when the client is gone: nobody waits for it any more.
  void leave();
  bool ended() const { return ended_.load(); }
  bool idle() const { return under_way_.load() == 0; }
  // Why the session ended by itself; empty: it did not. Once it has ended.
  const std::string& complaint() const { return complaint_; }
  const Memory& memory() const { return bell_->memory(); }

 private:
  using Works = std::list<std::unique_ptr<Work>>;

  void run();
  bool take_entries();
  void take(const Entry& entry);
  void cancel(const Entry& entry);
  bool work();
  bool work_on(Works& works);
  void rest();
  void give_up();
  void complete(const Work& work);
  void complete(const Entry& entry, const Work::Outcome& outcome);
  void break_off(const std::string& why);
  bool has_entries() const;

  const Limits& limits_;
  std::shared_ptr<Bell> bell_;
  Scope scope_;
  std::function<void()> on_end_;

  // The thread's.
  std::array<Works, kLanes> works_;
  std::array<bool, kSlots> busy_{};
  std::uint32_t taken_ = 0;  // entries
  std::string complaint_;

  std::atomic<std::uint32_t> under_way_{0};
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> left_{false};
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace engram::shm
