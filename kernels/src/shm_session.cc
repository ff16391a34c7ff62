#include "shm_session.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "futex.h"

namespace engram::shm {
namespace {

// Whatever a client does to the words of its memory, its session looks up so often.
constexpr std::chrono::seconds kSleepMax{1};
constexpr char kShuttingDown[] = "the server is shutting down";

}  // namespace

void Bell::ring() {
  rung_.store(true);
  std::uint32_t& doorbell = memory_.header().doorbell;
  shared(doorbell).fetch_add(1);
  if (asleep_.load()) futex_wake(doorbell);
}

void Bell::sleep(const std::function<bool()>& news, Clock::time_point until,
                 std::chrono::nanoseconds spin) {
  const auto called = [&] { return rung_.load() || news(); };
  const Clock::time_point spin_until = std::min(until, Clock::now() + spin);
  if (spin.count() > 0) {
    while (Clock::now() < spin_until) {
      if (called()) return;
      spin_hint();
    }
  }
  Header& header = memory_.header();
  const std::uint32_t doorbell = shared(header.doorbell).load();
  asleep_.store(true);
  shared(header.server_waits).store(1);
  // Who rings after this look finds the doorbell changed, or wakes us.
  if (!called()) {
    const auto left = std::min<std::chrono::nanoseconds>(until - Clock::now(), kSleepMax);
    futex_wait(header.doorbell, doorbell, left);
  }
  shared(header.server_waits).store(0);
  asleep_.store(false);
}

Session::Session(Serving& serving, const Limits& limits, Totals& totals, Memory memory,
                 std::function<void()> on_end)
    : limits_(limits),
      bell_(std::make_shared<Bell>(std::move(memory))),
      scope_{
          .serving = serving, .limits = limits, .totals = totals, .data = bell_->memory().data()},
      on_end_(std::move(on_end)) {
  // Reads may end after the session has: the bell stays for them.
  scope_.ring = [bell = bell_] { bell->ring(); };
}

Session::~Session() {
  stop();
  if (thread_.joinable()) thread_.join();
}

void Session::start() {
  thread_ = std::thread([this] { run(); });
}

void Session::drain() {
  draining_.store(true);
  bell_->ring();
}

void Session::stop() {
  stopping_.store(true);
  bell_->ring();
}

void Session::leave() {
  left_.store(true);
  stop();
}

void Session::run() {
  ::pthread_setname_np(::pthread_self(), "engram-shm");
  while (!stopping_.load() && complaint_.empty()) {
    bell_->clear();
    if (!take_entries() && !work()) rest();
  }
  give_up();
  ended_.store(true);
  on_end_();
}

bool Session::has_entries() const {
  return shared(bell_->memory().header().submitted).load() != taken_;
}

// Copies what is new in the ring.
bool Session::take_entries() {
  const Memory& memory = bell_->memory();
  const std::uint32_t count = shared(memory.header().submitted).load() - taken_;
  if (count > kRingEntries) {
    break_off("its ring of " + std::to_string(kRingEntries) + " entries claims to hold " +
              std::to_string(count));
    return false;
  }
  for (std::uint32_t i = 0; i < count && complaint_.empty(); ++i) {
    Entry entry;
    copy_once(&entry, &memory.entry(taken_++), sizeof entry);
    take(entry);
  }
  return count > 0;
}

void Session::take(const Entry& entry) {
  if (entry.slot >= kSlots) {
    return break_off("a request names slot " + std::to_string(entry.slot) + " of " +
                     std::to_string(kSlots));
  }
  if (entry.kind == Kind::cancel) return cancel(entry);
  if (busy_[entry.slot]) {
    return break_off("slot " + std::to_string(entry.slot) +
                     " was used again before its request was answered");
  }
  busy_[entry.slot] = true;
  under_way_.fetch_add(1);
  scope_.totals.requests.fetch_add(1, std::memory_order_relaxed);
  try {
    if (draining_.load()) throw Refusal(Status::unavailable, kShuttingDown);
    auto work = std::make_unique<Work>(scope_, entry);
    works_[static_cast<std::size_t>(work->lane())].push_back(std::move(work));
  } catch (const Refusal& refusal) {
    complete(entry, {.status = refusal.status, .sentence = refusal.what()});
  } catch (const std::bad_alloc&) {
    complete(entry, {.status = Status::resource_exhausted,
                     .sentence = "the server has no memory for this request now"});
  }
}

// A request that was answered meanwhile has nothing left to cancel.
void Session::cancel(const Entry& entry) {
  for (Works& works : works_) {
    const auto found = std::ranges::find_if(works, [&](const std::unique_ptr<Work>& work) {
      return work->entry().slot == entry.slot && work->entry().serial == entry.serial;
    });
    if (found == works.end()) continue;
    (*found)->end(Status::cancelled, "the client gave the request up");
    complete(**found);
    works.erase(found);
    return;
  }
}

// One step of the first work, lane by lane, that has one to make.
bool Session::work() {
  return std::ranges::any_of(works_, [&](Works& w) { return work_on(w); });
}

bool Session::work_on(Works& works) {
  for (auto at = works.begin(); at != works.end(); ++at) {
    const Work::Step step = (*at)->step();
    if (step == Work::Step::waits) continue;
    if (step == Work::Step::over) {
      complete(**at);
      works.erase(at);
    }
    return true;
  }
  return false;
}

void Session::rest() {
  Clock::time_point until = Clock::now() + kSleepMax;
  for (const Works& works : works_) {
    for (const std::unique_ptr<Work>& work : works) until = std::min(until, work->look_again());
  }
  bell_->sleep([&] { return has_entries(); }, until, limits_.spin);
}

// A client that is gone, or was shown out, gave its requests up: that is no failure of the server.
void Session::give_up() {
  const bool shutting_down = stopping_.load() && !left_.load();
  for (Works& works : works_) {
    for (const std::unique_ptr<Work>& work : works) {
      if (shutting_down) {
        work->end(Status::unavailable, kShuttingDown);
      } else {
        work->end(Status::cancelled, "the client is detached");
      }
      complete(*work);
    }
    works.clear();
  }
}

// Counted before the client can know, so that what it was told is in what it reads next.
void Session::complete(const Work& work) {
  if (work.outcome().status == Status::ok) {
    scope_.totals.lookups.answered(work.lane(), work.format()).add(now_ns() - work.began_ns());
  }
  complete(work.entry(), work.outcome());
}

void Session::complete(const Entry& entry, const Work::Outcome& outcome) {
  Completion& out = bell_->memory().completion(entry.slot);
  const std::size_t length = std::min(outcome.sentence.size(), out.message.size());
  out.status = outcome.status;
  out.payload_bytes = outcome.payload_bytes;
  out.row_bytes = outcome.row_bytes;
  out.retry_after_ms = outcome.retry_after_ms;
  const BatchStats& stats = outcome.stats;
  out.stats = {stats.rows,  stats.distinct,   stats.cached, stats.joined,
               stats.reads, stats.read_bytes, stats.groups};
  out.message_bytes = static_cast<std::uint32_t>(length);
  std::memcpy(out.message.data(), outcome.sentence.data(), length);
  busy_[entry.slot] = false;
  under_way_.fetch_sub(1);
  if (outcome.status != Status::ok) {
    auto& failures = scope_.totals.failures[static_cast<std::size_t>(outcome.status)];
    failures.fetch_add(1, std::memory_order_relaxed);
  }
  shared(out.serial).store(entry.serial);
  if (shared(out.client_waits).load() != 0) futex_wake(out.serial);
}

void Session::break_off(const std::string& why) { complaint_ = why; }

}  // namespace engram::shm
