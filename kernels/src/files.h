// Table files, opened for random reads: O_DIRECT at the alignment the kernel reports, proved by
// test reads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace engram {

// Alignment used when statx reports none, and the one a file is promoted to when its reported one
// fails.
inline constexpr std::uint32_t kFallbackAlignment = 4096;
// Larger alignments are read through the page cache instead; no NVMe namespace has them.
inline constexpr std::uint32_t kAlignmentMax = 4096;

struct DirectAlignment {
  std::uint32_t memory = 0;
  std::uint32_t offset = 0;
};

// What statx(STATX_DIOALIGN) says; zeros when the file system or kernel reports nothing.
DirectAlignment statx_dioalign(const std::string& path);

// Hardware queues of the block device that holds the file; 1 when that cannot be told.
unsigned hardware_queues(const std::string& path);

// One file open for reading. Move-only; closes on destruction.
class DataFile {
 public:
  // Opens and test-reads the first, middle and last page. Throws std::system_error with a sentence
  // when even buffered reads fail.
  explicit DataFile(std::string path);
  ~DataFile();
  DataFile(DataFile&& other) noexcept;
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;
  DataFile& operator=(DataFile&&) = delete;

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  // At open; the file may have been truncated since, which a read then reports.
  std::uint64_t size_bytes() const { return size_bytes_; }
  bool direct() const { return direct_; }
  // Alignment of offset, length and memory of every read; 1 when buffered.
  std::uint32_t alignment() const { return alignment_.load(std::memory_order_relaxed); }
  const std::string& reason() const { return reason_; }
  // Of the file system it lies on: files with the same one share its queue.
  std::uint64_t device() const { return device_; }
  // What has happened to the file since it was opened: a sentence, or empty while it is as it was.
  // (Replaced by another one of its name, it is.)
  std::string change() const;

  // After EINVAL on a direct read: true when the alignment was raised (or already is), so a retry
  // makes sense.
  bool promote_alignment(std::uint32_t failed_alignment);

 private:
  bool try_direct();

  std::string path_;
  int fd_ = -1;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t device_ = 0;
  std::int64_t modified_ns_ = 0;
  bool direct_ = false;
  std::atomic<std::uint32_t> alignment_{1};
  std::string reason_;
};

}  // namespace engram
