// The unit of work of every reader backend: jobs of many small reads, and the queue that hands them
// out.
#pragma once

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "files.h"

namespace engram {

// Longest single read. With the worst alignment its aligned span fits one buffer slot.
inline constexpr std::uint32_t kReadBytesMax = 4096;
inline constexpr std::size_t kSlotBytes = 2 * std::size_t{kAlignmentMax};
static_assert(kAlignmentMax - 1 + kReadBytesMax < kSlotBytes);

// Largest offset of a read: beyond it the aligned span would pass the largest file, and the very
// last offset means "the file's position" to io_uring.
inline constexpr std::uint64_t kOffsetMax = (std::uint64_t{1} << 63) - 2 * kSlotBytes;

// Times one read is tried again after EINTR or EAGAIN before it fails.
inline constexpr std::uint8_t kRetriesMax = 32;

// Item errors: 0, an errno, or this one.
inline constexpr std::int32_t kErrorTruncated = -1;
std::string error_text(std::int32_t error);

struct ReadItem {
  std::uint64_t offset;
  std::byte* dest;
  std::uint32_t file;
  std::uint32_t length;
};

// A batch of reads. The owner keeps it and its memory alive until `finished` has been called.
struct ReadJob {
  std::span<const ReadItem> items;
  std::span<std::int32_t> errors;  // one per item, zero at submission
  std::function<void()> finished;  // called once, on an io thread, after the last item ended

  std::size_t next = 0;  // first item not handed out yet; guarded by the queue
  std::atomic<std::size_t> remaining{0};
  std::atomic<bool> any_failed{false};
  std::atomic<bool> cancelled{false};  // set by the owner: items not handed out yet end unread

  // Called by a backend exactly once per item.
  void item_done(std::size_t index, std::int32_t error) {
    if (error != 0) {
      errors[index] = error;
      any_failed.store(true, std::memory_order_relaxed);
    }
    items_done(1);
  }
  // Called by the queue once, with all that was not handed out.
  void items_cancelled(std::size_t first) {
    errors[first] = ECANCELED;
    any_failed.store(true, std::memory_order_relaxed);
    items_done(items.size() - first);
  }

 private:
  void items_done(std::size_t count) {
    if (remaining.fetch_sub(count, std::memory_order_acq_rel) == count) finished();
  }
};

// Hands items of jobs to io threads, a few at a time and round robin, so that a short job does not
// wait for a long one. Its length is bounded by the engine's byte budget.
class ReadQueue {
 public:
  struct Claim {
    ReadJob* job = nullptr;
    std::size_t first = 0;
    std::size_t count = 0;  // 0 = nothing to do: idle (when not waiting) or stopped
  };

  void push(ReadJob* job);
  // Gives an item back, to be claimed again by whoever comes next.
  void give_back(ReadJob* job, std::size_t index);
  Claim claim(std::size_t max, bool wait);
  // Lets the queue run dry; then every claim returns nothing, until start() (a backend that failed
  // to come up stops the queue for the threads it had).
  void stop();
  void start();

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<ReadJob*> jobs_;
  std::vector<Claim> given_back_;
  unsigned waiting_ = 0;
  bool stopped_ = false;
};

// Bytes of the aligned span that covers a read.
constexpr std::uint64_t aligned_span(std::uint64_t offset, std::uint64_t length,
                                     std::uint64_t alignment) {
  return (offset % alignment + length + alignment - 1) / alignment * alignment;
}

// One read in progress: which aligned span of the file it covers, and how much of it has arrived.
class ReadProgress {
 public:
  enum class Next { done, again, failed };

  void start(const ReadItem& item, const DataFile& file);
  // Takes the result of a read of `ask_bytes()` at `ask_offset()` into `buffer + buffer_offset()`.
  Next advance(std::int64_t result, DataFile& file);

  std::uint64_t ask_offset() const { return begin_ + resume_; }
  std::uint32_t ask_bytes() const { return span_ - resume_; }
  std::uint32_t buffer_offset() const { return resume_; }
  // Where the wanted bytes begin in the buffer, once done.
  std::uint32_t head() const { return head_; }
  std::int32_t error() const { return error_; }
  bool was_short() const { return was_short_; }
  std::uint8_t retries() const { return retries_; }

 private:
  std::uint64_t offset_ = 0;
  std::uint64_t begin_ = 0;
  std::uint32_t length_ = 0;
  std::uint32_t span_ = 0;
  std::uint32_t head_ = 0;
  std::uint32_t got_ = 0;     // contiguous bytes from begin_
  std::uint32_t resume_ = 0;  // got_ aligned down: where the next ask begins
  std::uint32_t alignment_ = 1;
  std::int32_t error_ = 0;
  std::uint8_t retries_ = 0;
  bool was_short_ = false;
};

}  // namespace engram
