// The unit of the engine: the rows that one n-gram of one order fetches from one layer's table.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace engram {

// Rows of a whole group, one per head. A mask has a bit for each.
inline constexpr std::size_t kGroupRows = 8;
using RowMask = std::uint8_t;

constexpr unsigned count_rows(RowMask mask) { return static_cast<unsigned>(std::popcount(mask)); }

// What identifies a group. All its ids do: different n-grams may share some of their rows.
struct RowGroup {
  std::array<std::uint32_t, kGroupRows> ids{};
  std::uint16_t table = 0;
  std::uint16_t rows = kGroupRows;  // 1: a row on its own, its id first and the others 0

  bool operator==(const RowGroup& other) const {
    return std::memcmp(this, &other, sizeof *this) == 0;
  }
};
static_assert(std::has_unique_object_representations_v<RowGroup>);

// Largest number of rows of a table, so that 32 bits hold an id.
inline constexpr std::uint64_t kTableRowsMax = 0xFFFFFFFF;

// Seeded per process: ids come from clients, who must not be able to choose collisions.
class GroupHash {
 public:
  GroupHash();

  std::uint64_t operator()(const RowGroup& group) const {
    std::uint64_t words[4];
    std::memcpy(words, group.ids.data(), sizeof words);
    const std::uint64_t kind = std::uint64_t{group.table} << 16 | group.rows;
    return fold(fold(words[0] ^ seeds_[0], words[1] ^ seeds_[1]) ^ kind,
                fold(words[2] ^ seeds_[2], words[3] ^ seeds_[3]) ^ seeds_[4]);
  }

 private:
  // A 64 x 64 -> 128 multiplication, folded: every bit of the result depends on all bits of both.
  static std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }

  std::array<std::uint64_t, 5> seeds_;
};

}  // namespace engram
