#include "scales.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "read_job.h"

namespace engram {
namespace {

// Long enough for the disk's sequential speed, short enough that lookups' small reads are not held
// up behind one.
constexpr std::uint64_t kChunkBytes = 1 << 20;
static_assert(kChunkBytes % kAlignmentMax == 0 && kAlignmentMax % kScaleBytes == 0);

struct FreeDeleter {
  void operator()(std::byte* p) const { std::free(p); }
};

}  // namespace

ScaleMemory::ScaleMemory(const DataFile& file, std::uint64_t offset, std::uint64_t rows)
    : file_(file), offset_(offset), bytes_(rows * kScaleBytes) {
  void* const memory =
      ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::byte*>(memory);
  ::madvise(memory_, bytes_, MADV_HUGEPAGE);
}

ScaleMemory::~ScaleMemory() { ::munmap(memory_, bytes_); }

std::string ScaleMemory::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void ScaleMemory::fail(std::string text) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(text);
}

void ScaleMemory::load(const std::atomic<bool>& stop) {
  const std::unique_ptr<std::byte, FreeDeleter> buffer(
      static_cast<std::byte*>(std::aligned_alloc(kAlignmentMax, kChunkBytes)));
  if (!buffer) return fail("no memory for the read buffer");
  const std::uint64_t end = offset_ + bytes_;
  for (std::uint64_t at = offset_ / kAlignmentMax * kAlignmentMax; at < end; at += kChunkBytes) {
    if (stop.load(std::memory_order_relaxed) || !load_chunk(at, buffer.get())) return;
    const std::uint64_t have = std::min(at + kChunkBytes, end) - offset_;
    rows_loaded_.store(have / kScaleBytes, std::memory_order_release);
  }
}

// Reads the aligned chunk at `at` and keeps what belongs to the plane.
bool ScaleMemory::load_chunk(std::uint64_t at, std::byte* buffer) {
  const std::uint64_t begin = std::max(at, offset_);
  const std::uint64_t end = std::min(at + kChunkBytes, offset_ + bytes_);
  std::uint64_t got = 0;
  while (at + got < end) {
    // Only a whole number of aligned units may be skipped in a direct read.
    got = got / kAlignmentMax * kAlignmentMax;
    const ssize_t n =
        ::pread(file_.fd(), buffer + got, kChunkBytes - got, static_cast<off_t>(at + got));
    if (n < 0 && errno == EINTR) continue;
    const std::int32_t error = n < 0 ? errno : kErrorTruncated;
    if (n < 0 ||
        at + got + static_cast<std::uint64_t>(n) < std::min(end, at + got + kAlignmentMax)) {
      fail("reading scales of " + file_.path() + " at byte " + std::to_string(at + got) +
           " failed: " + error_text(error));
      return false;
    }
    got += static_cast<std::uint64_t>(n);
  }
  std::memcpy(memory_ + (begin - offset_), buffer + (begin - at), end - begin);
  return true;
}

}  // namespace engram
