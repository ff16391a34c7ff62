// From row ids to what must be read: the distinct groups of a batch, looked up in the cache.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "batch.h"

namespace engram {

// Plans one batch, on the calling thread: hits never wait for another.
class Planner {
 public:
  Planner(Batch& batch, const GroupHash& hash) : batch_(batch), hash_(hash) {}

  // What planning and reading may cost for each group, besides its rows.
  static std::uint64_t work_bytes();

  // First, for every layer in order: checks its ids and dedupes their groups. Throws
  // std::invalid_argument naming layer, position, column and id.
  void add(const LayerKeys& keys);
  // Rows that form no group are groups of their own: what these cost beyond the groups they stand
  // for.
  std::uint64_t split_bytes() const;
  // Then, once: finds the groups' rows or memory for them, and the misses.
  void look_up();

 private:
  // A key whose place in the table of distinct groups is being fetched.
  struct Staged {
    RowGroup key;
    RowMask need;
    std::uint64_t hash;
    std::int32_t* number;
  };
  struct Slot {
    std::uint32_t hash = 0;
    std::int32_t group = -1;
  };
  static constexpr std::size_t kStaged = 32;

  void check(const LayerKeys& keys, std::size_t position, std::size_t column) const;
  void add_resident(const LayerKeys& keys, Batch::LayerRows& rows);
  void add_position(const LayerKeys& keys, std::size_t position, Batch::LayerRows& rows);
  void split(const KeyGroup& group, Batch::LayerRows& rows, std::int32_t& number);
  void stage(const RowGroup& key, RowMask need, std::int32_t& number);
  void flush();
  Slot& slot_of(std::uint64_t hash, const RowGroup& key);
  void make_room(std::size_t groups);
  void place(Batch::LayerRows& rows);
  void own_memory(Batch::Group& group, std::size_t left);
  Miss& new_miss(std::uint32_t group);

  Batch& batch_;
  const GroupHash& hash_;
  std::uint64_t rows_ = 0;  // of the layer's table
  std::vector<Slot> slots_;
  std::vector<std::uint64_t> hashes_;  // of the batch's groups
  std::array<Staged, kStaged> staged_;
  std::size_t staged_count_ = 0;
  std::uint64_t splits_ = 0;
  std::span<std::byte> free_;  // rest of the batch's newest piece of own memory
};

}  // namespace engram
