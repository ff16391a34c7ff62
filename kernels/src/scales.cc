#include "scales.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "file_range.h"

namespace engram {
namespace {

// Long enough for the disk's sequential speed, short enough that lookups' small reads are not held
// up behind one.
constexpr std::uint64_t kChunkBytes = 1 << 20;
static_assert(kChunkBytes % kScaleBytes == 0);

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

void ScaleMemory::load(const std::atomic<bool>& stop) {
  try {
    RangeReader reader(kChunkBytes);
    for (std::uint64_t at = 0; at < bytes_ && !stop.load(std::memory_order_relaxed);) {
      const std::uint64_t bytes = std::min(kChunkBytes, bytes_ - at);
      std::memcpy(memory_ + at, reader.read(file_, offset_ + at, bytes), bytes);
      at += bytes;
      rows_loaded_.store(at / kScaleBytes, std::memory_order_release);
    }
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    error_ = error.what();
  }
}

}  // namespace engram
