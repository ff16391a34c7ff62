// The ids of a lookup, as its caller holds them, and the groups they form.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "row_group.h"

namespace engram {

// Which of the ids of a position are wanted, and how they form groups.
struct Columns {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t group_rows = 1;  // kGroupRows, or 1

  std::size_t count() const { return end - begin; }
  std::size_t first_group() const { return begin / group_rows; }
  std::size_t groups() const { return (end + group_rows - 1) / group_rows - first_group(); }
  // Wanted rows of the g-th of those groups, as begin and end within it.
  std::array<std::size_t, 2> rows_of(std::size_t g) const {
    const std::size_t first = (first_group() + g) * group_rows;
    return {begin > first ? begin - first : 0, std::min(end - first, group_rows)};
  }
};

// What the ids of a group ask for.
struct KeyGroup {
  enum class What : std::uint8_t {
    rows,
    zero_rows,  // all of them are -1
    mixture,    // some are
    no_rows,    // some are out of range
  };
  RowGroup key;
  What what;
  std::uint8_t first;  // of its rows, those wanted
  std::uint8_t count;

  RowMask need() const { return static_cast<RowMask>(((1u << count) - 1) << first); }
};

// Ids [positions, whole blocks] of one layer; strides in elements.
struct LayerKeys {
  std::int64_t layer = 0;
  const std::int64_t* ids = nullptr;
  std::int64_t position_stride = 0;
  std::int64_t column_stride = 0;

  std::int64_t id(std::size_t position, std::size_t column) const {
    return ids[static_cast<std::int64_t>(position) * position_stride +
               static_cast<std::int64_t>(column) * column_stride];
  }
  // Fills in the g-th of the groups that the columns form, of a table with so many rows. In place:
  // a copy would wait for the bytes just written.
  //
  // Ids outside the wanted columns are part of the key, whatever they are: a slot holds, as its row
  // r, row ids[r] of the table or nothing.
  void fill(KeyGroup& group, std::size_t position, const Columns& columns, std::size_t g,
            std::uint16_t table, std::uint64_t rows) const {
    const auto [begin, end] = columns.rows_of(g);
    const std::int64_t* const first =
        &ids[static_cast<std::int64_t>(position) * position_stride +
             static_cast<std::int64_t>((columns.first_group() + g) * columns.group_rows) *
                 column_stride];
    group.key = {.table = table, .rows = static_cast<std::uint16_t>(columns.group_rows)};
    group.what = KeyGroup::What::rows;
    group.first = static_cast<std::uint8_t>(begin);
    group.count = static_cast<std::uint8_t>(end - begin);
    std::size_t zeros = 0;
    bool outside = false;
    for (std::size_t r = 0; r < columns.group_rows; ++r) {
      const std::int64_t row = first[static_cast<std::int64_t>(r) * column_stride];
      group.key.ids[r] = static_cast<std::uint32_t>(row);
      if (r < begin || r >= end) continue;
      zeros += row == -1;
      // As unsigned, -1 + 1 is 0 and everything below wraps beyond any row count.
      outside |= static_cast<std::uint64_t>(row) + 1 > rows;
    }
    if (outside) {
      group.what = KeyGroup::What::no_rows;
    } else if (zeros > 0) {
      group.what = zeros == group.count ? KeyGroup::What::zero_rows : KeyGroup::What::mixture;
    }
  }
};

}  // namespace engram
