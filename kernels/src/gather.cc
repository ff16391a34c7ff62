// The part of batch.h that hands rows over.
#include <cstring>
#include <stdexcept>
#include <string>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "batch.h"
#include "dequant.h"

namespace engram {
namespace {

constexpr std::size_t kCacheLineBytes = 64;
// How far ahead of the copy a group, or a row of a resident table, is fetched.
constexpr std::size_t kGroupsAhead = 2;
constexpr std::size_t kRowsAhead = 12;

// Inlined always: a function that does nothing but fetch ahead counts as one without effect, and
// calls of it are dropped.
[[gnu::always_inline]] inline void prefetch_bytes(const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLineBytes) __builtin_prefetch(from + at);
}

constexpr std::uint32_t kZeroId = 0xFFFFFFFF;

// A gather of more bytes than this writes past the CPU's caches: they could not keep it, and
// writing through them means that every line of it is read first.
constexpr std::size_t kCachedBytesMax = 2 << 20;

#ifdef __SSE2__
// `bytes` and both addresses are multiples of 16. Not ordered with other stores before a fence.
[[gnu::always_inline]] inline void copy_past_caches(const std::byte* from, std::size_t bytes,
                                                    std::byte* out) {
  for (std::size_t at = 0; at < bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + at),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
}
bool may_pass_caches(const std::byte* from, std::size_t bytes, const std::byte* out) {
  return ((reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(out) | bytes) %
          16) == 0;
}
void order_stores() { _mm_sfence(); }
#else
void copy_past_caches(const std::byte*, std::size_t, std::byte*) {}
bool may_pass_caches(const std::byte*, std::size_t, const std::byte*) { return false; }
void order_stores() {}
#endif

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
      throw std::invalid_argument(
          "layers of different row kinds have no packed form in common; ask for them one by one");
    }
    bytes = row_bytes(layer, format);
  }
  return count * layers_.size() * width() * bytes;
}

// How rows of one kind leave in one format.
struct Batch::Output {
  Output(RowKind kind, Format format)
      : convert(row_converter(kind, format)),
        packed_bytes(engram::packed_bytes(kind)),
        bytes(output_bytes(kind, format)),
        as_they_are(format == Format::packed) {}

  ConvertRow convert;
  std::size_t packed_bytes;
  std::size_t bytes;
  bool as_they_are;
  bool past_caches = false;
};

void Batch::gather(std::size_t first, std::size_t count, Format format, std::byte* out) const {
  const std::size_t bytes = gathered_bytes(first, count, format);
  if (bytes == 0) return;
  std::vector<Output> outputs;
  for (const LayerRows& rows : layers_) {
    outputs.emplace_back(rows.table->table.kind, format);
    outputs.back().past_caches = bytes > kCachedBytesMax;
  }
  for (std::size_t position = first; position < first + count; ++position) {
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      const LayerRows& rows = layers_[layer];
      out = rows.resident != nullptr ? gather_resident(rows, position, outputs[layer], out)
                                     : gather_groups(rows, position, outputs[layer], out);
    }
  }
  order_stores();
}

std::byte* Batch::gather_groups(const LayerRows& rows, std::size_t position, const Output& output,
                                std::byte* out) const {
  const std::size_t groups = columns_.groups();
  const Place* const places = rows.places.data() + position * groups;
  const std::size_t left = rows.places.size() - position * groups;
  for (std::size_t g = 0; g < groups; ++g) {
    const auto [begin, end] = columns_.rows_of(g);
    if (g + kGroupsAhead < left && places[g + kGroupsAhead].together()) {
      // Of another n-gram order, perhaps, and so of other columns: whole groups are what matters.
      prefetch_bytes(places[g + kGroupsAhead].data() + begin * output.packed_bytes,
                     (end - begin) * output.packed_bytes);
    }
    if (places[g].together() && output.as_they_are) {
      const std::byte* const from = places[g].data() + begin * output.packed_bytes;
      const std::size_t bytes = (end - begin) * output.packed_bytes;
      if (output.past_caches && may_pass_caches(from, bytes, out)) {
        copy_past_caches(from, bytes, out);
      } else {
        std::memcpy(out, from, bytes);
      }
      out += bytes;
      continue;
    }
    for (std::size_t r = begin; r < end; ++r, out += output.bytes) {
      const std::byte* const from = row(rows, places[g], r);
      if (from == nullptr) {
        std::memset(out, 0, output.bytes);
      } else {
        output.convert(from, out);
      }
    }
  }
  return out;
}

std::byte* Batch::gather_resident(const LayerRows& rows, std::size_t position, const Output& output,
                                  std::byte* out) const {
  const std::size_t packed = output.packed_bytes;
  const std::size_t end = (position + 1) * width();
  for (std::size_t at = position * width(); at < end; ++at, out += output.bytes) {
    const std::size_t ahead = at + kRowsAhead;
    if (ahead < rows.ids.size() && rows.ids[ahead] != kZeroId) {
      prefetch_bytes(rows.resident + rows.ids[ahead] * packed, packed);
    }
    if (rows.ids[at] == kZeroId) {
      std::memset(out, 0, output.bytes);
    } else {
      output.convert(rows.resident + rows.ids[at] * packed, out);
    }
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
}

}  // namespace engram
