// One small read of a table file: what is asked for, and how its bytes arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

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

// How a read failed: an errno, or one of these.
inline constexpr std::int32_t kErrorTruncated = -1;
inline constexpr std::int32_t kErrorChecksum = -2;
std::string error_text(std::int32_t error);

// Whose reads go first. All but decode are bulk.
enum class Lane : std::uint8_t { decode = 0, prefill = 1, prefetch = 2 };
inline constexpr std::size_t kLanes = 3;
inline constexpr Lane kAllLanes[kLanes] = {Lane::decode, Lane::prefill, Lane::prefetch};
constexpr bool is_bulk(Lane lane) { return lane != Lane::decode; }

inline constexpr std::uint16_t kNoTable = 0xFFFF;

struct Read {
  std::uint64_t offset = 0;
  std::uint32_t file = 0;          // number in the reader
  std::uint16_t length = 0;        // 1 .. kReadBytesMax
  std::uint16_t table = kNoTable;  // number in the engine, to be counted by
  std::uint64_t tag = 0;           // whatever the one who asked knows it by
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

  void start(const Read& read, const DataFile& file);
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
  std::uint16_t length_ = 0;
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
