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
#include "planner.h"
#include "row_output.h"

namespace engram {

class HitCopier {
 public:
  // `order` as for a batch of the same rows. `request` tells it from others that run meanwhile.
  HitCopier(const EngineShared& shared, const GroupHash& hash, const std::vector<LayerKeys>& keys,
            const Columns& columns, std::size_t positions, Format format, std::uint32_t request);

  // Copies all rows as Batch::gather() lays them out. None when a batch must do it: then some of
  // `out` may have been written.
  std::optional<BatchStats> copy(std::byte* out);

 private:
  struct Layer {
    const LayerKeys* keys;
    std::uint16_t number;  // of the table
    std::uint64_t rows;    // of the table
    RowOutput output;
  };
  struct Staged {
    enum class What : std::uint8_t {
      rows,
      zero_rows,
      other,  // for a batch: some are zero rows, or an id is out of range
    };
    RowGroup key;
    std::uint64_t hash;
    What what;
  };
  static constexpr std::size_t kRing = 32;  // a power of 2, beyond every look ahead

  void stage();
  Staged& staged(std::size_t at) { return ring_[at % kRing]; }
  void look_ahead(std::size_t at);
  bool take(const Staged& group, const Layer& layer, std::size_t g, BatchStats& stats);

  RowCache& cache_;
  const GroupHash& hash_;
  Columns columns_;
  std::size_t positions_;
  std::uint32_t request_;
  std::vector<Layer> layers_;
  std::size_t total_;  // groups
  std::byte* out_ = nullptr;

  // Of the next group to be staged.
  std::size_t next_ = 0;
  std::size_t position_ = 0;
  std::size_t layer_ = 0;
  std::size_t group_ = 0;
  std::array<Staged, kRing> ring_;
};

}  // namespace engram
