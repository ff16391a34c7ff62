#include "read_queue.h"

#include <unistd.h>

#include <algorithm>
#include <map>

namespace engram {

Devices::Devices(const std::vector<DataFile>& files, unsigned depth, unsigned bulk_depth)
    : files_(files), depth_(depth), bulk_depth_(std::clamp(bulk_depth, 1u, depth)) {
  std::map<std::uint64_t, std::uint32_t> numbers;
  for (const DataFile& file : files) {
    const auto next = static_cast<std::uint32_t>(numbers.size());
    device_of_file_.push_back(numbers.try_emplace(file.device(), next).first->second);
  }
  count_ = std::max<std::size_t>(1, numbers.size());
  devices_ = std::make_unique<Device[]>(count_);
}

bool Devices::has_room(std::uint32_t file, Lane lane) const {
  return has_room(devices_[device_of_file_[file]], lane);
}

bool Devices::has_room(Lane lane) const {
  return std::ranges::any_of(std::span(devices_.get(), count_),
                             [&](const Device& device) { return has_room(device, lane); });
}

bool Devices::has_room(const Device& device, Lane lane) const {
  return device.all.load(std::memory_order_relaxed) < depth_ &&
         (!is_bulk(lane) || device.bulk.load(std::memory_order_relaxed) < bulk_depth_);
}

unsigned Devices::in_flight(std::uint32_t file) const {
  return devices_[device_of_file_[file]].all.load(std::memory_order_relaxed);
}

void Devices::started(std::uint32_t file, Lane lane) {
  Device& device = devices_[device_of_file_[file]];
  device.all.fetch_add(1, std::memory_order_relaxed);
  if (is_bulk(lane)) device.bulk.fetch_add(1, std::memory_order_relaxed);
}

void Devices::ended(std::uint32_t file, Lane lane) {
  Device& device = devices_[device_of_file_[file]];
  device.all.fetch_sub(1, std::memory_order_relaxed);
  if (is_bulk(lane)) device.bulk.fetch_sub(1, std::memory_order_relaxed);
}

void Devices::raise_depth(unsigned factor) {
  depth_ *= factor;
  bulk_depth_ *= factor;
}

void ReadQueue::push(ReadSource& source, Lane lane) {
  const std::lock_guard lock(mutex_);
  if (source.pushed_ns_ == 0) source.pushed_ns_ = now_ns();  // else it is pushed again
  lanes_[static_cast<std::size_t>(lane)].sources.push_back(&source);
  wake_one();
}

void ReadQueue::give_back(const Claimed& claimed) {
  const std::lock_guard lock(mutex_);
  given_back_.push_back(claimed);
  wake_one();
}

// One thread is enough: when it leaves something, it wakes the next.
void ReadQueue::wake_one() {
  for (Sleeper* sleeper : sleepers_) {
    if (!sleeper->asleep) continue;
    sleeper->asleep = false;
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the sleeper is awake.
    [[maybe_unused]] const ssize_t written = ::write(sleeper->event_fd, &one, sizeof one);
    return;
  }
  ++calls_;
  if (waiting_ > 0) wake_.notify_one();
}

// Something that could be read now, as far as can be told without asking the sources.
bool ReadQueue::has_work() const {
  if (!given_back_.empty()) return true;
  for (const Lane lane : kAllLanes) {
    const bool waits = !lanes_[static_cast<std::size_t>(lane)].sources.empty();
    if (waits && devices_.has_room(lane)) return true;
  }
  return false;
}

std::size_t ReadQueue::claim(std::span<Claimed> out, Sleeper* sleeper) {
  while (true) {
    std::vector<Leaving> leaving;
    std::size_t count = 0;
    {
      const std::lock_guard lock(mutex_);
      if (sleeper != nullptr) sleeper->asleep = false;
      count = take(out, leaving);
      if (sleeper != nullptr) sleeper->asleep = count < out.size() && !stopped_;
    }
    // Nothing taken must mean that nothing is there, or a queue that stops would leave it behind.
    const bool came_back = dismiss(leaving);
    if (count > 0 || !came_back) return count;
  }
}

std::size_t ReadQueue::wait_and_claim(std::span<Claimed> out) {
  while (true) {
    std::vector<Leaving> leaving;
    std::size_t count = 0;
    {
      std::unique_lock lock(mutex_);
      count = take(out, leaving);
      if (count == 0 && leaving.empty()) {
        // What has no room now is claimed by the threads whose reads take that room.
        if (stopped_) return 0;
        ++waiting_;
        wake_.wait(lock, [&, seen = calls_] { return stopped_ || calls_ != seen; });
        --waiting_;
      }
    }
    dismiss(leaving);
    if (count > 0) return count;
  }
}

std::size_t ReadQueue::take(std::span<Claimed> out, std::vector<Leaving>& leaving) {
  const std::size_t given_back = take_given_back(out);
  std::size_t count = given_back;
  for (bool more = true; more && count < out.size();) {
    more = false;
    for (const Lane lane : order()) {
      const std::size_t got = take_from(lane, out.subspan(count), leaving);
      if (got == 0) continue;
      count_run(lane, got);
      count += got;
      more = true;
      break;
    }
  }
  if (count > 0) stamp(out.first(count), given_back);
  if (count == out.size() && has_work()) wake_one();
  return count;
}

// Those that were given back, the first so many, have done their waiting before.
void ReadQueue::stamp(std::span<Claimed> claimed, std::size_t given_back) {
  const std::int64_t now = now_ns();
  for (Claimed& one : claimed) one.claimed_ns = now;
  for (std::size_t i = given_back, end; i < claimed.size(); i = end) {
    const Claimed& first = claimed[i];
    for (end = i + 1; end < claimed.size() && claimed[end].source == first.source;) ++end;
    metrics_.queued(first.lane).add(now - first.source->pushed_ns_, end - i);
  }
}

std::size_t ReadQueue::take_given_back(std::span<Claimed> out) {
  std::size_t count = 0;
  for (; count < out.size() && !given_back_.empty(); ++count) {
    out[count] = given_back_.back();
    given_back_.pop_back();
    devices_.started(out[count].read.file, out[count].lane);
  }
  return count;
}

// A turn of the first source that has something to read where there is room.
std::size_t ReadQueue::take_from(Lane lane, std::span<Claimed> out, std::vector<Leaving>& leaving) {
  // The rule when disks are busy: then every source of the lane would be asked in vain.
  if (!devices_.has_room(lane)) return 0;
  std::deque<ReadSource*>& sources = lanes_[static_cast<std::size_t>(lane)].sources;
  Room room(devices_, lane);
  std::array<Read, kTurnReads> reads;
  for (std::size_t tries = sources.size(); tries-- > 0;) {
    ReadSource* const source = sources.front();
    sources.pop_front();
    if (source->wants_out()) {
      leaving.push_back({.source = source, .lane = lane, .exhausted = false});
      continue;
    }
    const std::size_t count =
        source->next(std::span(reads).first(std::min(out.size(), kTurnReads)), room);
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = {.source = source, .read = reads[i], .lane = lane};
    }
    if (source->exhausted() || source->wants_out()) {
      leaving.push_back({.source = source, .lane = lane, .exhausted = source->exhausted()});
    } else {
      sources.push_back(source);
    }
    if (count > 0) return count;
  }
  return 0;
}

// Decode, prefill, prefetch; but a lane that has had its run lets those below it go first.
std::array<Lane, kLanes> ReadQueue::order() const {
  std::array<Lane, kLanes> order{Lane::decode, Lane::prefill, Lane::prefetch};
  if (lanes_[1].run >= kLaneRun) std::swap(order[1], order[2]);
  if (lanes_[0].run >= kLaneRun) std::rotate(order.begin(), order.begin() + 1, order.end());
  return order;
}

void ReadQueue::count_run(Lane lane, std::size_t reads) {
  const auto number = static_cast<std::size_t>(lane);
  // A read pays for so many of the lanes above, whether it comes alone or in a whole turn.
  constexpr unsigned kPays = kLaneRun / kTurnReads;
  for (std::size_t above = 0; above < number; ++above) {
    unsigned& run = lanes_[above].run;
    run -= std::min(run, static_cast<unsigned>(reads) * kPays);
  }
  bool others_wait = false;
  for (std::size_t below = number + 1; below < kLanes; ++below) {
    others_wait |= !lanes_[below].sources.empty();
  }
  lanes_[number].run = others_wait ? lanes_[number].run + static_cast<unsigned>(reads) : 0;
}

// Whether one came back.
bool ReadQueue::dismiss(const std::vector<Leaving>& leaving) {
  bool came_back = false;
  for (const Leaving& left : leaving) {
    if (!left.exhausted && left.source->give_up()) {
      push(*left.source, left.lane);
      came_back = true;
    } else {
      left.source->left_queue();
    }
  }
  return came_back;
}

void ReadQueue::add(Sleeper& sleeper) {
  const std::lock_guard lock(mutex_);
  sleepers_.push_back(&sleeper);
}

void ReadQueue::remove(Sleeper& sleeper) {
  const std::lock_guard lock(mutex_);
  std::erase(sleepers_, &sleeper);
  wake_one();  // it may have been woken for what it will not take
}

bool ReadQueue::stopped() const {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

void ReadQueue::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  wake_.notify_all();
  for (std::size_t i = 0; i < sleepers_.size(); ++i) wake_one();
}

void ReadQueue::start() {
  const std::lock_guard lock(mutex_);
  stopped_ = false;
}

}  // namespace engram
