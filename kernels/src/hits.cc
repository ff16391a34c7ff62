#include "hits.h"

#include <algorithm>
#include <atomic>

namespace engram {
namespace {

// How many groups ahead of its lookup a group's entry is fetched, and of its copy its rows.
constexpr std::size_t kEntryAhead = 8;
constexpr std::size_t kRowsAhead = 3;

}  // namespace

HitCopier::HitCopier(const EngineShared& shared, const GroupHash& hash,
                     const std::vector<LayerKeys>& keys, const Columns& columns,
                     std::size_t positions, Format format, std::uint64_t request)
    : cache_(*shared.cache),
      hash_(hash),
      columns_(columns),
      request_(request),
      rows_(positions * keys.size() * columns.count()),
      left_(positions * keys.size() * columns.groups()) {
  for (const LayerKeys& layer : keys) {
    const Table& table = shared.tables[shared.tables.number_of(layer.layer)].table;
    bytes_ += positions * columns.count() * output_bytes(table.kind, format);
  }
  layers_.reserve(keys.size());
  for (const LayerKeys& layer : keys) {
    const std::uint16_t number = shared.tables.number_of(layer.layer);
    const Table& table = shared.tables[number].table;
    layers_.push_back({.keys = &layer,
                       .number = number,
                       .rows = table.rows,
                       .output = RowOutput(table.kind, format, bytes_)});
  }
}

std::optional<BatchStats> HitCopier::copy(std::byte* out) {
  out_ = out;
  BatchStats stats{.rows = rows_};
  while (tiles_[0].count < kTile && left_ > 0) stage(tiles_[0]);
  for (std::size_t now = 0; tiles_[now].count > 0; now = 1 - now) {
    if (!pin(tiles_[now], stats)) return std::nullopt;
    copy(tiles_[now], tiles_[1 - now]);
  }
  RowOutput::finish();
  return stats;
}

// Adds the next group, and has its set fetched.
inline void HitCopier::stage(Tile& tile) {
  Group& group = tile.groups[tile.count++];
  --left_;
  const Layer& layer = layers_[layer_];
  layer.keys->fill(group, position_, columns_, group_, layer.number, layer.rows);
  group.layer = static_cast<std::uint32_t>(layer_);
  group.hash = hash_(group.key);
  cache_.prefetch_set(group.hash);
  if (++group_ < columns_.groups()) return;
  group_ = 0;
  if (++layer_ < layers_.size()) return;
  layer_ = 0;
  ++position_;
}

// False, with nothing pinned, when a batch must do it.
bool HitCopier::pin(Tile& tile, BatchStats& stats) {
  for (std::size_t i = 0; i < std::min(kEntryAhead, tile.count); ++i) {
    cache_.prefetch_entry(tile.groups[i].hash);
  }
  for (std::size_t i = 0; i < tile.count; ++i) {
    if (i + kEntryAhead < tile.count) cache_.prefetch_entry(tile.groups[i + kEntryAhead].hash);
    Group& group = tile.groups[i];
    group.data = nullptr;
    if (group.what == KeyGroup::What::zero_rows) continue;
    if (group.what == KeyGroup::What::rows) {
      const RowCache::Hit hit = cache_.find(group.key, group.hash, group.need(), request_);
      group.data = hit.data;
      group.entry = hit.entry;
      stats.groups += hit.first;
      stats.distinct += count_rows(hit.fresh);
    }
    if (group.data == nullptr) {
      unpin(tile, i);
      return false;
    }
  }
  stats.cached = stats.distinct;
  return true;
}

// Empties a tile, and fills the next one meanwhile.
void HitCopier::copy(Tile& tile, Tile& next) {
  const auto fetch = [&](std::size_t i) __attribute__((always_inline)) {  // see prefetch_bytes
    if (i >= tile.count || tile.groups[i].data == nullptr) return;
    const Group& group = tile.groups[i];
    const std::size_t packed = layers_[group.layer].output.packed_bytes();
    prefetch_bytes(group.data + group.first * packed, group.count * packed);
  };
  for (std::size_t i = 0; i < kRowsAhead; ++i) fetch(i);
  for (std::size_t i = 0; i < tile.count; ++i) {
    if (left_ > 0) stage(next);
    fetch(i + kRowsAhead);
    const Group& group = tile.groups[i];
    const RowOutput& output = layers_[group.layer].output;
    out_ = group.data == nullptr
               ? output.write_zeros(group.count, out_)
               : output.write(group.data + group.first * output.packed_bytes(), group.count, out_);
  }
  unpin(tile, tile.count);
  tile.count = 0;
}

// The first `count` groups.
void HitCopier::unpin(Tile& tile, std::size_t count) {
  for (const Group& group : std::span(tile.groups).first(count)) {
    if (group.data != nullptr) cache_.unpin(group.entry);
  }
}

}  // namespace engram
