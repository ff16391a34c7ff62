#include "planner.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

namespace engram {
namespace {

// How many groups ahead of its lookup a group's set, and then its entry, are fetched.
constexpr std::size_t kSetAhead = 16;
constexpr std::size_t kEntryAhead = 8;
// Memory of a batch's own, taken in pieces that the allocator hands out again.
constexpr std::size_t kPieceBytes = 1 << 20;
constexpr std::uint32_t kZeroId = 0xFFFFFFFF;

}  // namespace

std::uint64_t Planner::work_bytes() {
  return sizeof(Batch::Group) + sizeof(Miss) + sizeof(Miss*) + sizeof(std::int32_t) +
         sizeof(Batch::Place) + sizeof(std::uint64_t) + 4 * sizeof(Slot);
}

std::uint64_t Planner::split_bytes() const { return splits_ * kGroupRows * work_bytes(); }

void Planner::add(const LayerKeys& keys) {
  Batch::LayerRows& rows = batch_.layers_.emplace_back();
  rows.number = batch_.shared_->tables.number_of(keys.layer);
  rows.table = &batch_.shared_->tables[rows.number];
  rows_ = rows.table->table.rows;
  rows.resident = rows.table->resident_rows();
  batch_.stats_.rows += batch_.positions_ * batch_.width();
  // However many positions: an array of them takes no memory when it has no columns.
  if (batch_.width() == 0) return;
  if (rows.resident != nullptr) return add_resident(keys, rows);
  rows.index.resize(batch_.positions_ * batch_.columns_.groups());
  make_room(batch_.groups_.size() + rows.index.size());
  batch_.groups_.reserve(batch_.groups_.size() + rows.index.size());
  hashes_.reserve(batch_.groups_.size() + rows.index.size());
  for (std::size_t position = 0; position < batch_.positions_; ++position) {
    add_position(keys, position, rows);
  }
  flush();
}

// Throws for an id out of range.
void Planner::check(const LayerKeys& keys, std::size_t position, std::size_t column) const {
  const std::int64_t id = keys.id(position, column);
  // As in LayerKeys::fill.
  if (static_cast<std::uint64_t>(id) + 1 <= rows_) return;
  throw std::invalid_argument("layer " + std::to_string(keys.layer) + ", position " +
                              std::to_string(position) + ", column " + std::to_string(column) +
                              ": row id " + std::to_string(id) +
                              " is out of range; the table has " + std::to_string(rows_) +
                              " rows (and -1 asks for a zero row)");
}

void Planner::add_resident(const LayerKeys& keys, Batch::LayerRows& rows) {
  rows.ids.resize(batch_.positions_ * batch_.width());
  std::uint32_t* out = rows.ids.data();
  std::uint64_t zeros = 0;
  for (std::size_t position = 0; position < batch_.positions_; ++position) {
    for (std::size_t column = batch_.columns_.begin; column < batch_.columns_.end; ++column) {
      check(keys, position, column);
      *out = static_cast<std::uint32_t>(keys.id(position, column));
      zeros += *out++ == kZeroId;
    }
  }
  batch_.stats_.distinct += rows.ids.size() - zeros;
  batch_.stats_.cached += rows.ids.size() - zeros;
}

void Planner::add_position(const LayerKeys& keys, std::size_t position, Batch::LayerRows& rows) {
  const Columns& columns = batch_.columns_;
  for (std::size_t g = 0; g < columns.groups(); ++g) {
    std::int32_t& number = rows.index[position * columns.groups() + g];
    KeyGroup group;
    keys.fill(group, position, columns, g, rows.number, rows_);
    switch (group.what) {
      case KeyGroup::What::rows:
        stage(group.key, group.need(), number);
        break;
      case KeyGroup::What::zero_rows:
        number = Batch::kZeroRows;
        break;
      case KeyGroup::What::mixture:
        split(group, rows, number);
        break;
      case KeyGroup::What::no_rows:
        for (std::size_t c = columns.begin; c < columns.end; ++c) check(keys, position, c);
    }
  }
}

// Some rows of the group are zero rows: the others stand alone.
void Planner::split(const KeyGroup& group, Batch::LayerRows& rows, std::int32_t& number) {
  number = Batch::kSplit - static_cast<std::int32_t>(rows.splits.size());
  auto& singles = rows.splits.emplace_back();
  singles.fill(Batch::kZeroRows);
  for (std::size_t r = group.first; r < std::size_t{group.first} + group.count; ++r) {
    const std::uint32_t id = group.key.ids[r];
    if (id == kZeroId) continue;
    stage({.ids = {id}, .table = group.key.table, .rows = 1}, 1, singles[r]);
  }
  ++splits_;
}

void Planner::stage(const RowGroup& key, RowMask need, std::int32_t& number) {
  Staged& staged = staged_[staged_count_++];
  staged = {.key = key, .need = need, .hash = hash_(key), .number = &number};
  __builtin_prefetch(&slots_[staged.hash & (slots_.size() - 1)], 1);
  if (staged_count_ == kStaged) flush();
}

void Planner::flush() {
  make_room(batch_.groups_.size() + staged_count_);
  for (const Staged& staged : std::span(staged_).first(staged_count_)) {
    Slot& slot = slot_of(staged.hash, staged.key);
    if (slot.group < 0) {
      slot = {.hash = static_cast<std::uint32_t>(staged.hash >> 32),
              .group = static_cast<std::int32_t>(batch_.groups_.size())};
      batch_.groups_.push_back({.key = staged.key});
      hashes_.push_back(staged.hash);
    }
    batch_.groups_[static_cast<std::size_t>(slot.group)].need |= staged.need;
    *staged.number = slot.group;
  }
  staged_count_ = 0;
}

// Where the key is, or belongs. Open addressing with linear probing, at most half full.
Planner::Slot& Planner::slot_of(std::uint64_t hash, const RowGroup& key) {
  const std::size_t mask = slots_.size() - 1;
  const auto high = static_cast<std::uint32_t>(hash >> 32);
  for (std::size_t at = hash & mask;; at = (at + 1) & mask) {
    Slot& slot = slots_[at];
    if (slot.group < 0) return slot;
    if (slot.hash == high && batch_.groups_[static_cast<std::size_t>(slot.group)].key == key) {
      return slot;
    }
  }
}

void Planner::make_room(std::size_t groups) {
  if (2 * groups <= slots_.size()) return;
  if (groups > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::length_error("a batch cannot have more than 2^31 - 1 groups");
  }
  slots_.assign(std::bit_ceil(std::max<std::size_t>(64, 2 * groups)), Slot{});
  for (std::size_t i = 0; i < hashes_.size(); ++i) {
    slot_of(hashes_[i], batch_.groups_[i].key) = {
        .hash = static_cast<std::uint32_t>(hashes_[i] >> 32),
        .group = static_cast<std::int32_t>(i)};
  }
}

void Planner::look_up() {
  RowCache* const cache = batch_.shared_->cache.get();
  BatchStats& stats = batch_.stats_;
  std::uint64_t hits = 0;
  std::uint64_t joined = 0;
  std::uint64_t overflows = 0;
  for (std::size_t i = 0; i < batch_.groups_.size(); ++i) {
    Batch::Group& group = batch_.groups_[i];
    const auto number = static_cast<std::uint32_t>(i);
    RowCache::Found found{.missing = group.need, .own = group.need};
    if (cache != nullptr) {
      if (i + kSetAhead < hashes_.size()) cache->prefetch_set(hashes_[i + kSetAhead]);
      if (i + kEntryAhead < hashes_.size()) cache->prefetch_entry(hashes_[i + kEntryAhead]);
      found = cache->lookup(group.key, hashes_[i], group.need,
                            [&]() -> Miss& { return new_miss(number); });
      overflows += found.entry == Miss::kNoEntry;
    }
    group.entry = found.entry;
    group.data = found.data;
    if (found.entry == Miss::kNoEntry) {
      own_memory(group, batch_.groups_.size() - i);
      Miss& miss = new_miss(number);
      miss.data = group.data;
      miss.need = miss.reads = group.need;
    }
    if (found.own != 0) batch_.to_read_.push_back(&batch_.misses_.back());
    hits += found.missing == 0;
    joined += found.missing != 0 && found.own == 0;
    stats.distinct += count_rows(group.need);
    stats.cached += count_rows(group.need & static_cast<RowMask>(~found.missing));
    stats.joined += count_rows(found.missing & static_cast<RowMask>(~found.own));
  }
  for (Batch::LayerRows& rows : batch_.layers_) place(rows);
  stats.groups = batch_.groups_.size();
  if (cache != nullptr) {
    CacheCounters& counters = cache->counters();
    counters.hits.fetch_add(hits, std::memory_order_relaxed);
    counters.joined.fetch_add(joined, std::memory_order_relaxed);
    counters.misses.fetch_add(stats.groups - hits - joined, std::memory_order_relaxed);
    counters.overflows.fetch_add(overflows, std::memory_order_relaxed);
  }
}

// So that gathering goes to rows directly.
void Planner::place(Batch::LayerRows& rows) {
  rows.places.resize(rows.index.size());
  for (std::size_t i = 0; i < rows.index.size(); ++i) {
    const std::int32_t number = rows.index[i];
    if (number >= 0) {
      rows.places[i] = Batch::Place::of(batch_.groups_[static_cast<std::size_t>(number)].data);
    } else if (number <= Batch::kSplit) {
      rows.places[i] = Batch::Place::split(static_cast<std::size_t>(Batch::kSplit - number));
    }
  }
  rows.index = std::vector<std::int32_t>();
}

// `left`: groups that may still want some.
void Planner::own_memory(Batch::Group& group, std::size_t left) {
  const RowKind kind = batch_.shared_->tables[group.key.table].table.kind;
  const std::size_t bytes = group.key.rows * packed_bytes(kind);
  if (free_.size() < bytes) {
    const std::size_t piece = std::max(bytes, std::min(kPieceBytes, left * bytes));
    batch_.own_memory_.push_back(std::make_unique_for_overwrite<std::byte[]>(piece));
    batch_.own_bytes_ += piece;
    free_ = {batch_.own_memory_.back().get(), piece};
  }
  group.data = free_.data();
  free_ = free_.subspan(bytes);
}

Miss& Planner::new_miss(std::uint32_t group) {
  Miss& miss = batch_.misses_.emplace_back();
  batch_.parts_.fetch_add(1, std::memory_order_relaxed);
  miss.batch = &batch_;
  miss.wanted = &batch_.wanted_;
  miss.group = group;
  miss.lane = batch_.lane_;
  return miss;
}

}  // namespace engram
