#include "hits.h"

#include <algorithm>
#include <atomic>

namespace engram {
namespace {

// How many groups ahead of its copy a group's set, then its entry, and then its rows are fetched.
constexpr std::size_t kSetAhead = 24;
constexpr std::size_t kEntryAhead = 12;
constexpr std::size_t kRowsAhead = 2;

RowMask mask_of(std::array<std::size_t, 2> rows) {
  return static_cast<RowMask>((1u << rows[1]) - (1u << rows[0]));
}

}  // namespace

HitCopier::HitCopier(const EngineShared& shared, const GroupHash& hash,
                     const std::vector<LayerKeys>& keys, const Columns& columns,
                     std::size_t positions, Format format, std::uint32_t request)
    : cache_(*shared.cache),
      hash_(hash),
      columns_(columns),
      positions_(positions),
      request_(request),
      total_(positions * keys.size() * columns.groups()) {
  std::size_t bytes = 0;
  for (const LayerKeys& layer : keys) {
    const Table& table = shared.tables[shared.tables.number_of(layer.layer)].table;
    bytes += positions * columns.count() * output_bytes(table.kind, format);
  }
  layers_.reserve(keys.size());
  for (const LayerKeys& layer : keys) {
    const std::uint16_t number = shared.tables.number_of(layer.layer);
    const Table& table = shared.tables[number].table;
    layers_.push_back({.keys = &layer,
                       .number = number,
                       .rows = table.rows,
                       .output = RowOutput(table.kind, format, bytes)});
  }
}

std::optional<BatchStats> HitCopier::copy(std::byte* out) {
  out_ = out;
  BatchStats stats{.rows = positions_ * layers_.size() * columns_.count()};
  while (next_ < std::min(kSetAhead, total_)) stage();
  for (std::size_t at = 0; at < total_;) {
    for (const Layer& layer : layers_) {
      for (std::size_t g = 0; g < columns_.groups(); ++g, ++at) {
        look_ahead(at);
        if (!take(staged(at), layer, g, stats)) return std::nullopt;
      }
    }
  }
  RowOutput::finish();
  return stats;
}

inline void HitCopier::look_ahead(std::size_t at) {
  if (next_ < total_) stage();
  if (at + kEntryAhead < total_) cache_.prefetch_entry(staged(at + kEntryAhead).hash);
  if (at + kRowsAhead < total_) cache_.prefetch_rows(staged(at + kRowsAhead).hash);
}

inline void HitCopier::stage() {
  Staged& staged = ring_[next_++ % kRing];
  const Layer& layer = layers_[layer_];
  const auto [begin, end] = columns_.rows_of(group_);
  const std::int64_t stride = layer.keys->column_stride;
  const std::int64_t* const ids =
      layer.keys->ids + static_cast<std::int64_t>(position_) * layer.keys->position_stride +
      static_cast<std::int64_t>((columns_.first_group() + group_) * columns_.group_rows) * stride;
  staged.key = {.table = layer.number, .rows = static_cast<std::uint16_t>(columns_.group_rows)};
  std::size_t zeros = 0;
  bool outside = false;
  for (std::size_t r = 0; r < columns_.group_rows; ++r) {
    const std::int64_t id = ids[static_cast<std::int64_t>(r) * stride];
    staged.key.ids[r] = static_cast<std::uint32_t>(id);
    if (r < begin || r >= end) continue;  // whatever it is, it only tells groups apart
    zeros += id == -1;
    outside |= static_cast<std::uint64_t>(id) + 1 > layer.rows;
  }
  staged.what = zeros == end - begin   ? Staged::What::zero_rows
                : zeros > 0 || outside ? Staged::What::other
                                       : Staged::What::rows;
  staged.hash = hash_(staged.key);
  cache_.prefetch_set(staged.hash);
  if (++group_ < columns_.groups()) return;
  group_ = 0;
  if (++layer_ < layers_.size()) return;
  layer_ = 0;
  ++position_;
}

// False when a batch must do it.
inline bool HitCopier::take(const Staged& group, const Layer& layer, std::size_t g,
                            BatchStats& stats) {
  const std::array<std::size_t, 2> wanted = columns_.rows_of(g);
  const std::size_t rows = wanted[1] - wanted[0];
  if (group.what == Staged::What::zero_rows) {
    out_ = layer.output.write_zeros(rows, out_);
    return true;
  }
  if (group.what == Staged::What::other) return false;
  const RowCache::Hit hit = cache_.find(group.key, group.hash, mask_of(wanted), request_);
  if (hit.data == nullptr) return false;
  out_ = layer.output.write(hit.data + wanted[0] * layer.output.packed_bytes(), rows, out_);
  cache_.unpin(hit.entry);
  if (hit.first) {
    ++stats.groups;
    stats.distinct += rows;
    stats.cached += rows;
  }
  return true;
}

}  // namespace engram
