// Records of the packed store (docs/format.md): where a row lies in its table's pages, and the
// checksum that says it is that row of that store.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "format.h"

namespace engram {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kSealBytes = 4;  // the CRC-32C behind every packed row

using StoreUuid = std::array<std::byte, 16>;

// How rows of one kind fill pages: whole records from the page's start, then zeros.
struct RecordFormat {
  std::size_t row_bytes;
  std::size_t record_bytes;
  std::size_t records_per_page;

  static constexpr RecordFormat of(RowKind kind) {
    const std::size_t record = packed_bytes(kind) + kSealBytes;
    return {packed_bytes(kind), record, kPageBytes / record};
  }

  // From the table's first page.
  constexpr std::uint64_t offset_of(std::uint64_t row) const {
    return row / records_per_page * kPageBytes + row % records_per_page * record_bytes;
  }

  constexpr std::uint64_t pages_of(std::uint64_t rows) const {
    return (rows + records_per_page - 1) / records_per_page;
  }
};

static_assert(RecordFormat::of(RowKind::fp4).record_bytes == 140 &&
              RecordFormat::of(RowKind::fp4).records_per_page == 29);
static_assert(RecordFormat::of(RowKind::fp8).record_bytes == 268 &&
              RecordFormat::of(RowKind::fp8).records_per_page == 15);

// Computes the seals of one table. Immutable, so threads may share it.
class RecordSeal {
 public:
  RecordSeal(const StoreUuid& uuid, std::uint32_t layer);

  // CRC-32C over UUID, u32 layer, u64 row (both little-endian) and the packed row: about 20 ns for
  // an FP4 row. A record is whole when its last 4 bytes, read as they lie, are this.
  std::uint32_t of(std::uint64_t row, const std::byte* packed, std::size_t bytes) const;

  // Whether the `bytes` of a packed row and the seal behind them are row `row` of this table.
  bool matches(std::uint64_t row, const std::byte* record, std::size_t bytes) const;

 private:
  std::uint32_t prefix_;  // the CRC of UUID and layer
};

}  // namespace engram
