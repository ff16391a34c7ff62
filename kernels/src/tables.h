// The tables of an engine, and what of them is in memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "record.h"
#include "resident.h"
#include "scales.h"
#include "table.h"

namespace engram {

struct TableState {
  explicit TableState(Table table);

  Table table;
  std::vector<RecordSeal> seals;  // one per copy
  // One per copy: whether a read of it has failed. The others are read instead, while there are
  // any: a copy that fails at once would always be the least loaded.
  std::vector<std::atomic<bool>> failed;
  // Each is set at most once, and read by every batch.
  std::atomic<ScaleMemory*> scales{nullptr};
  std::atomic<ResidentRows*> resident{nullptr};
  std::unique_ptr<ScaleMemory> scales_owner;
  std::unique_ptr<ResidentRows> resident_owner;

  // Rows whose scales need no read.
  std::uint64_t scale_rows_loaded() const {
    const ScaleMemory* const memory = scales.load(std::memory_order_acquire);
    return memory == nullptr ? 0 : memory->rows_loaded();
  }
  // All rows, once the whole table is in memory; else null.
  const std::byte* resident_rows() const {
    const ResidentRows* const memory = resident.load(std::memory_order_acquire);
    return memory == nullptr ? nullptr : memory->whole();
  }
};

// Of one table: a miss numbers them with 8 bits.
inline constexpr std::size_t kCopiesMax = 255;

class Tables {
 public:
  // Throws std::invalid_argument for a layer given twice, without copies or with too many, or with
  // more rows than ids can number.
  explicit Tables(std::vector<Table> tables);

  std::size_t count() const { return states_.size(); }
  TableState& operator[](std::size_t number) { return states_[number]; }
  const TableState& operator[](std::size_t number) const { return states_[number]; }
  // Throws std::invalid_argument for a layer without a table.
  std::uint16_t number_of(std::int64_t layer) const;
  // Of the longest packed row.
  std::size_t row_bytes_max() const;

 private:
  std::deque<TableState> states_;
};

}  // namespace engram
