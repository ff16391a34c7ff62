#include "read_job.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace engram {

std::string error_text(std::int32_t error) {
  if (error == 0) return "no error";
  if (error == kErrorTruncated) return "the file ends before the row does: it was truncated";
  return std::strerror(error);
}

void ReadQueue::push(ReadJob* job) {
  job->remaining.store(job->items.size(), std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  jobs_.push_back(job);
  if (waiting_ > 0) wake_.notify_all();
}

void ReadQueue::give_back(ReadJob* job, std::size_t index) {
  const std::lock_guard lock(mutex_);
  given_back_.push_back({.job = job, .first = index, .count = 1});
  if (waiting_ > 0) wake_.notify_one();
}

ReadQueue::Claim ReadQueue::claim(std::size_t max, bool wait) {
  std::unique_lock lock(mutex_);
  while (true) {
    if (wait) {
      ++waiting_;
      wake_.wait(lock, [&] { return stopped_ || !jobs_.empty() || !given_back_.empty(); });
      --waiting_;
    }
    if (!given_back_.empty()) {
      const Claim claim = given_back_.back();
      given_back_.pop_back();
      return claim;
    }
    if (jobs_.empty()) return {};
    ReadJob* const job = jobs_.front();
    jobs_.pop_front();
    const std::size_t first = job->next;
    if (job->cancelled.load(std::memory_order_relaxed)) {
      job->next = job->items.size();
      lock.unlock();  // what ends a job takes locks of its own
      job->items_cancelled(first);
      lock.lock();
      continue;
    }
    const std::size_t count = std::min(max, job->items.size() - first);
    job->next += count;
    if (job->next < job->items.size()) jobs_.push_back(job);
    return {.job = job, .first = first, .count = count};
  }
}

void ReadQueue::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  wake_.notify_all();
}

void ReadQueue::start() {
  const std::lock_guard lock(mutex_);
  stopped_ = false;
}

void ReadProgress::start(const ReadItem& item, const DataFile& file) {
  offset_ = item.offset;
  length_ = item.length;
  alignment_ = file.alignment();
  begin_ = offset_ / alignment_ * alignment_;
  head_ = static_cast<std::uint32_t>(offset_ - begin_);
  span_ = static_cast<std::uint32_t>(aligned_span(offset_, length_, alignment_));
  got_ = 0;
  resume_ = 0;
}

ReadProgress::Next ReadProgress::advance(std::int64_t result, DataFile& file) {
  if (result < 0) {
    const auto error = static_cast<std::int32_t>(-result);
    if ((error == EINTR || error == EAGAIN) && retries_ < kRetriesMax) {
      ++retries_;
      return Next::again;
    }
    if (error == EINVAL && file.promote_alignment(alignment_)) {
      ++retries_;
      start({.offset = offset_, .dest = nullptr, .file = 0, .length = length_}, file);
      return Next::again;
    }
    error_ = error;
    return Next::failed;
  }
  const std::uint32_t arrived = resume_ + static_cast<std::uint32_t>(result);
  if (arrived >= head_ + length_) return Next::done;
  was_short_ = true;
  // A short read goes on from the last aligned byte while there is progress; none means the file
  // ends here.
  if (arrived <= got_) {
    error_ = kErrorTruncated;
    return Next::failed;
  }
  got_ = arrived;
  resume_ = got_ / alignment_ * alignment_;
  return Next::again;
}

}  // namespace engram
