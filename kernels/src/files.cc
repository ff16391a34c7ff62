#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

namespace engram {
namespace {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

// Reads up to one page at `offset`; 0 or the errno.
int test_read(int fd, std::uint64_t offset, std::byte* page, std::size_t length) {
  ssize_t got;
  do {
    got = ::pread(fd, page, length, static_cast<off_t>(offset));
  } while (got < 0 && errno == EINTR);
  return got < 0 ? errno : 0;
}

// First, middle and last page: file systems that accept O_DIRECT and then refuse to read are found
// here.
int test_reads(int fd, std::uint64_t size, std::uint32_t alignment) {
  if (size == 0) return 0;
  const std::unique_ptr<std::byte, FreeDeleter> page(
      static_cast<std::byte*>(std::aligned_alloc(kAlignmentMax, kAlignmentMax)));
  if (!page) return ENOMEM;
  const auto align_down = [&](std::uint64_t at) { return at / alignment * alignment; };
  for (const std::uint64_t at : {std::uint64_t{0}, align_down(size / 2), align_down(size - 1)}) {
    if (const int error = test_read(fd, at, page.get(), alignment)) return error;
  }
  return 0;
}

bool same_file(int a, int b) {
  struct stat first{};
  struct stat second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

std::int64_t modified_ns(const struct stat& info) {
  return info.st_mtim.tv_sec * std::int64_t{1'000'000'000} + info.st_mtim.tv_nsec;
}

}  // namespace

DirectAlignment statx_dioalign(const std::string& path) {
  struct statx info{};
  if (::statx(AT_FDCWD, path.c_str(), 0, STATX_DIOALIGN, &info) != 0 ||
      (info.stx_mask & STATX_DIOALIGN) == 0) {
    return {};
  }
  return {.memory = info.stx_dio_mem_align, .offset = info.stx_dio_offset_align};
}

unsigned hardware_queues(const std::string& path) {
  namespace fs = std::filesystem;
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0) return 1;
  std::error_code ignored;
  const fs::path device = fs::canonical("/sys/dev/block/" + std::to_string(major(info.st_dev)) +
                                            ":" + std::to_string(minor(info.st_dev)),
                                        ignored);
  if (ignored) return 1;
  // A partition's queues are its disk's.
  for (const fs::path& disk : {device, device.parent_path()}) {
    const fs::directory_iterator queues(disk / "mq", ignored);
    if (ignored) continue;
    return std::max(1u, static_cast<unsigned>(std::distance(begin(queues), end(queues))));
  }
  return 1;
}

DataFile::DataFile(std::string path) : path_(std::move(path)) {
  struct stat info{};
  // Asked before it is opened: that of a FIFO waits for a writer.
  if (::stat(path_.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    const int error = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    throw std::system_error(error, std::generic_category(), path_ + " is not a regular file");
  }
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "cannot open " + path_);
  if (::fstat(fd_, &info) != 0) {
    const int error = errno;
    ::close(fd_);
    throw std::system_error(error, std::generic_category(), "cannot examine " + path_);
  }
  size_bytes_ = static_cast<std::uint64_t>(info.st_size);
  device_ = info.st_dev;
  modified_ns_ = modified_ns(info);
  if (try_direct()) return;
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
  if (const int error = test_reads(fd_, size_bytes_, kFallbackAlignment)) {
    ::close(fd_);
    throw std::system_error(
        error, std::generic_category(),
        "a test read of " + path_ + " failed, direct (" + reason_ + ") and buffered");
  }
  reason_ = "buffered with random advice: " + reason_;
}

DataFile::~DataFile() {
  if (fd_ >= 0) ::close(fd_);
}

DataFile::DataFile(DataFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      size_bytes_(other.size_bytes_),
      device_(other.device_),
      modified_ns_(other.modified_ns_),
      direct_(other.direct_),
      alignment_(other.alignment()),
      reason_(std::move(other.reason_)) {}

std::string DataFile::change() const {
  struct stat info{};
  if (::fstat(fd_, &info) != 0) return path_ + ": " + std::strerror(errno);
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size != size_bytes_) {
    return path_ + " had " + std::to_string(size_bytes_) + " bytes when it was opened and has " +
           std::to_string(size) + " now";
  }
  if (modified_ns(info) != modified_ns_) return path_ + " was written to since it was opened";
  return {};
}

// Replaces fd_ by a direct one when O_DIRECT opens and reads; else says in reason_ why not.
bool DataFile::try_direct() {
  const int direct_fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (direct_fd < 0) {
    reason_ = std::string("O_DIRECT refused at open: ") + std::strerror(errno);
    return false;
  }
  if (!same_file(fd_, direct_fd)) {
    ::close(direct_fd);
    reason_ = "the file was replaced while it was opened";
    return false;
  }
  const DirectAlignment reported = statx_dioalign(path_);
  const bool known = reported.offset != 0;
  const std::uint32_t first =
      known ? std::max(reported.offset, reported.memory) : kFallbackAlignment;
  const std::string source = known ? "as statx reports" : "statx reports none";
  int error = first > kAlignmentMax ? EOPNOTSUPP : test_reads(direct_fd, size_bytes_, first);
  std::uint32_t alignment = first;
  if (error == EINVAL && first < kFallbackAlignment) {
    alignment = kFallbackAlignment;
    error = test_reads(direct_fd, size_bytes_, alignment);
  }
  if (error != 0) {
    ::close(direct_fd);
    reason_ = std::string("O_DIRECT test read at alignment ") + std::to_string(alignment) +
              " failed: " + std::strerror(error);
    return false;
  }
  ::close(fd_);
  fd_ = direct_fd;
  direct_ = true;
  alignment_ = alignment;
  reason_ = "O_DIRECT at " + std::to_string(alignment) + " B (" + source +
            (alignment == first ? ")" : ", promoted after EINVAL)");
  return true;
}

bool DataFile::promote_alignment(std::uint32_t failed_alignment) {
  if (!direct_ || failed_alignment >= kFallbackAlignment) return false;
  alignment_.store(kFallbackAlignment, std::memory_order_relaxed);
  return true;
}

}  // namespace engram
