// Whole tables in bulk: rows of a source into packed rows or into a store's pages, and pages
// checked. Threads call these on chunks of their own; nothing is shared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "format.h"
#include "record.h"

namespace engram {

// Rows as a source holds them: in two planes, or interleaved (one plane inside the other's stride).
struct SourceRows {
  RowKind kind;
  std::size_t count;
  const std::byte* codes;
  std::size_t codes_stride;
  const std::byte* scales;
  std::size_t scales_stride;
};

// What was noticed while rows were packed. Nothing is refused here.
struct PackReport {
  struct Suspect {
    std::uint64_t row;
    std::uint8_t why;  // see suspicion()
  };
  std::vector<Suspect> suspects;
  std::uint64_t clipped_blocks = 0;  // see quantise_row()
};

// Writes the rows packed as `kind`, back to back. `first` is the first one's row id.
PackReport pack_rows(const SourceRows& rows, std::uint64_t first, RowKind kind, std::byte* out);

// Writes the rows' records into `pages`, whose first record is that of row `origin`, the first of a
// page. What remains of the page behind the last row is zeroed, as is all padding before it.
PackReport seal_pages(const SourceRows& rows, std::uint64_t first, RowKind kind,
                      const RecordSeal& seal, std::uint64_t origin, std::byte* pages);

struct PageFaults {
  std::vector<std::uint64_t> rows;   // whose seal does not match
  std::vector<std::uint64_t> pages;  // whose padding is not zero; counted from the table's first
};

// Checks the pages of `count` rows from `first` on, the first of a page.
PageFaults check_pages(const std::byte* pages, std::uint64_t first, std::size_t count, RowKind kind,
                       const RecordSeal& seal);

}  // namespace engram
