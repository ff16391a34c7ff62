// One table's scale bytes in memory, loaded in the background while lookups already use what has
// arrived.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "files.h"
#include "format.h"

namespace engram {

class ScaleMemory {
 public:
  // Scales of `rows` rows, kScaleBytes each, contiguous from `offset` of `file` (which must outlive
  // this). Reserves the memory; throws std::bad_alloc when the kernel refuses it.
  ScaleMemory(const DataFile& file, std::uint64_t offset, std::uint64_t rows);
  ~ScaleMemory();
  ScaleMemory(const ScaleMemory&) = delete;
  ScaleMemory& operator=(const ScaleMemory&) = delete;

  // Reads the plane front to back; returns early when `stop` turns true or a read fails (see
  // error()).
  void load(const std::atomic<bool>& stop);

  // Rows below this may be taken from of().
  std::uint64_t rows_loaded() const { return rows_loaded_.load(std::memory_order_acquire); }
  const std::byte* of(std::uint64_t row) const { return memory_ + row * kScaleBytes; }
  // Why loading ended before its time; empty while all is well. The rows missing are still on disk.
  std::string error() const;

 private:
  const DataFile& file_;
  std::uint64_t offset_;
  std::uint64_t bytes_;
  std::byte* memory_ = nullptr;
  std::atomic<std::uint64_t> rows_loaded_{0};
  mutable std::mutex mutex_;
  std::string error_;
};

}  // namespace engram
