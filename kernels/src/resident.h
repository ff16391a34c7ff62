// A whole table in memory, loaded in the background while lookups are answered from disk.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "file_range.h"
#include "files.h"
#include "format.h"
#include "table.h"

namespace engram {

class ResidentRows {
 public:
  // Packed rows of the table's first copy. The files must outlive this. Reserves the memory; throws
  // std::bad_alloc when the kernel refuses it.
  ResidentRows(const std::vector<DataFile>& files, const Table& table);
  ~ResidentRows();
  ResidentRows(const ResidentRows&) = delete;
  ResidentRows& operator=(const ResidentRows&) = delete;

  // Reads the table front to back; returns early when `stop` turns true or a read fails (see
  // error()).
  void load(const std::atomic<bool>& stop);

  std::uint64_t rows_loaded() const { return rows_loaded_.load(std::memory_order_acquire); }
  // All rows one after another; null until the last has arrived.
  const std::byte* whole() const { return rows_loaded() == rows_ ? memory_ : nullptr; }
  // Why loading ended before its time; empty while all is well. Lookups go on reading the disk.
  std::string error() const;

 private:
  std::uint64_t load_planes(std::uint64_t first);
  std::uint64_t load_pages(std::uint64_t first);

  const std::vector<DataFile>& files_;
  TableCopy copy_;
  std::int64_t layer_;
  RowKind kind_;
  std::uint64_t rows_;
  std::size_t row_bytes_;
  std::byte* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  std::optional<RangeReader> codes_;  // or pages
  std::optional<RangeReader> scales_;
  std::atomic<std::uint64_t> rows_loaded_{0};
  mutable std::mutex mutex_;
  std::string error_;
};

}  // namespace engram
