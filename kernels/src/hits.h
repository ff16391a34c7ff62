// Rows that the cache holds, copied out as they are looked up: without a plan, a batch, or a second
// look at any of them. What it cannot do it leaves to a batch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "batch.h"
#include "row_output.h"

namespace engram {

class HitCopier {
 public:
  // `order` as for a batch of the same rows. `request` tells it from others that run meanwhile.
  HitCopier(const EngineShared& shared, const GroupHash& hash, const std::vector<LayerKeys>& keys,
            const Columns& columns, std::size_t positions, Format format, std::uint64_t request);

  // Copies all rows as Batch::gather() lays them out. None when a batch must do it: then some of
  // `out` may have been written.
  std::optional<BatchStats> copy(std::byte* out);
  // Of all rows.
  std::size_t bytes() const { return bytes_; }

 private:
  struct Layer {
    const LayerKeys* keys;
    std::uint16_t number;  // of the table
    std::uint64_t rows;    // of the table
    RowOutput output;
  };
  struct Group : KeyGroup {
    std::uint32_t layer;  // number in the order
    std::uint32_t entry;
    std::uint64_t hash;
    const std::byte* data;  // null: zero rows
  };
  // Groups are worked on in tiles: all of one are pinned, then copied, then unpinned. Pins take
  // locked instructions, which wait for every store that is on its way past the caches.
  static constexpr std::size_t kTile = 32;
  struct Tile {
    std::array<Group, kTile> groups;
    std::size_t count = 0;
  };

  void stage(Tile& tile);
  bool pin(Tile& tile, BatchStats& stats);
  void copy(Tile& tile, Tile& next);
  void unpin(Tile& tile, std::size_t count);

  RowCache& cache_;
  const GroupHash& hash_;
  Columns columns_;
  std::uint64_t request_;
  std::vector<Layer> layers_;
  std::uint64_t rows_;
  std::size_t bytes_ = 0;
  std::byte* out_ = nullptr;

  // Of the next group to be staged.
  std::size_t left_;
  std::size_t position_ = 0;
  std::size_t layer_ = 0;
  std::size_t group_ = 0;
  std::array<Tile, 2> tiles_;
};

}  // namespace engram
