// One layer's table: where its rows lie, in one copy or in several equal ones.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "format.h"
#include "record.h"

namespace engram {

// Row r of a plane lies at offset + r * stride of a file of the reader.
struct Plane {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t stride = 0;
};

// A copy in place: codes and scales of a row lie apart.
struct Planes {
  Plane codes;
  Plane scales;
};

// A copy in a packed store: whole records in pages from `offset` on, each sealed with a checksum.
struct Pages {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  StoreUuid uuid{};
};

struct TableCopy {
  Planes planes{};
  std::optional<Pages> pages{};  // set: a packed store, and `planes` means nothing

  std::uint32_t file() const { return pages ? pages->file : planes.codes.file; }
};

struct Table {
  std::int64_t layer = 0;
  std::uint64_t rows = 0;
  RowKind kind = RowKind::fp4;
  std::vector<TableCopy> copies{};
};

}  // namespace engram
