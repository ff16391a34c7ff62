// The part of batch.h that hands rows over.
#include <cstring>
#include <stdexcept>
#include <string>

#include "batch.h"
#include "row_output.h"

namespace engram {
namespace {

// How far ahead of the copy a group, or a row of a resident table, is fetched.
constexpr std::size_t kGroupsAhead = 2;
constexpr std::size_t kRowsAhead = 12;

constexpr std::uint32_t kZeroId = 0xFFFFFFFF;

}  // namespace

std::size_t Batch::row_bytes(std::size_t layer, Format format) const {
  check();
  if (layer >= layers_.size()) {
    throw std::invalid_argument("layer number " + std::to_string(layer) + " of a batch of " +
                                std::to_string(layers_.size()) + " layers");
  }
  return output_bytes(layers_[layer].table->table.kind, format);
}

std::size_t Batch::gathered_bytes(std::size_t first, std::size_t count, Format format) const {
  check();
  if (first > positions_ || count > positions_ - first) {
    throw std::invalid_argument("positions " + std::to_string(first) + " to " +
                                std::to_string(first + count) + " of a batch of " +
                                std::to_string(positions_));
  }
  std::size_t bytes = 0;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (layer > 0 && row_bytes(layer, format) != bytes) {
      throw std::invalid_argument(kNoCommonForm);
    }
    bytes = row_bytes(layer, format);
  }
  return count * layers_.size() * width() * bytes;
}

void Batch::gather(std::size_t first, std::size_t count, Format format, std::byte* out) const {
  const std::size_t bytes = gathered_bytes(first, count, format);
  if (bytes == 0) return;
  const std::int64_t began_ns = now_ns();
  std::vector<RowOutput> outputs;
  for (const LayerRows& rows : layers_) outputs.emplace_back(rows.table->table.kind, format, bytes);
  for (std::size_t position = first; position < first + count; ++position) {
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      const LayerRows& rows = layers_[layer];
      out = rows.resident != nullptr ? gather_resident(rows, position, outputs[layer], out)
                                     : gather_groups(rows, position, outputs[layer], out);
    }
  }
  RowOutput::finish();
  shared_->converted.add(format, now_ns() - began_ns, bytes);
}

std::byte* Batch::gather_groups(const LayerRows& rows, std::size_t position,
                                const RowOutput& output, std::byte* out) const {
  const std::size_t groups = columns_.groups();
  const Place* const places = rows.places.data() + position * groups;
  const std::size_t left = rows.places.size() - position * groups;
  const std::size_t packed = output.packed_bytes();
  for (std::size_t g = 0; g < groups; ++g) {
    const auto [begin, end] = columns_.rows_of(g);
    if (g + kGroupsAhead < left && places[g + kGroupsAhead].together()) {
      // Of another n-gram order, perhaps, and so of other columns: whole groups are what matters.
      prefetch_bytes(places[g + kGroupsAhead].data() + begin * packed, (end - begin) * packed);
    }
    if (places[g].together()) {
      out = output.write(places[g].data() + begin * packed, end - begin, out);
      continue;
    }
    for (std::size_t r = begin; r < end; ++r) {
      const std::byte* const from = row(rows, places[g], r);
      out = from == nullptr ? output.write_zeros(1, out) : output.write(from, 1, out);
    }
  }
  return out;
}

std::byte* Batch::gather_resident(const LayerRows& rows, std::size_t position,
                                  const RowOutput& output, std::byte* out) const {
  const std::size_t packed = output.packed_bytes();
  const std::size_t end = (position + 1) * width();
  for (std::size_t at = position * width(); at < end; ++at) {
    const std::size_t ahead = at + kRowsAhead;
    if (ahead < rows.ids.size() && rows.ids[ahead] != kZeroId) {
      prefetch_bytes(rows.resident + rows.ids[ahead] * packed, packed);
    }
    out = rows.ids[at] == kZeroId ? output.write_zeros(1, out)
                                  : output.write(rows.resident + rows.ids[at] * packed, 1, out);
  }
  return out;
}

// Row r of a place; null = a zero row.
const std::byte* Batch::row(const LayerRows& rows, Place place, std::size_t r) const {
  if (place.is_split()) {
    const std::int32_t number = rows.splits[place.number()][r];
    return number == kZeroRows ? nullptr : groups_[static_cast<std::size_t>(number)].data;
  }
  return place.zero() ? nullptr : place.data() + r * packed_bytes(rows.table->table.kind);
}

const std::byte* Batch::row(const LayerRows& rows, std::size_t position, std::size_t column) const {
  if (rows.resident != nullptr) {
    const std::uint32_t id = rows.ids[position * width() + column];
    return id == kZeroId ? nullptr : rows.resident + id * packed_bytes(rows.table->table.kind);
  }
  const std::size_t absolute = columns_.begin + column;
  const std::size_t g = absolute / columns_.group_rows - columns_.first_group();
  return row(rows, rows.places[position * columns_.groups() + g], absolute % columns_.group_rows);
}

void Batch::pick(std::size_t layer, std::span<const std::int64_t> picks, Format format,
                 std::byte* out) const {
  const std::size_t bytes = row_bytes(layer, format);
  const std::int64_t began_ns = now_ns();
  const LayerRows& rows = layers_[layer];
  const ConvertRow convert = row_converter(rows.table->table.kind, format);
  const std::size_t packed = packed_bytes(rows.table->table.kind);
  const std::size_t have = positions_ * width();
  const auto from = [&](std::int64_t at) {
    if (static_cast<std::uint64_t>(at) >= have) {
      throw std::invalid_argument("row " + std::to_string(at) + " of a batch of " +
                                  std::to_string(have) + " rows a layer");
    }
    const auto flat = static_cast<std::size_t>(at);
    return row(rows, flat / width(), flat % width());
  };
  for (std::size_t i = 0; i < picks.size(); ++i, out += bytes) {
    if (i + kRowsAhead < picks.size()) {
      if (const std::byte* const ahead = from(picks[i + kRowsAhead])) {
        prefetch_bytes(ahead, packed);
      }
    }
    if (const std::byte* const here = from(picks[i])) {
      convert(here, out);
    } else {
      std::memset(out, 0, bytes);
    }
  }
  shared_->converted.add(format, now_ns() - began_ns, picks.size() * bytes);
}

}  // namespace engram
