#include "pages.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "dequant.h"
#include "repack.h"

namespace engram {
namespace {

// Packs one row; returns the number of clipped blocks.
using PackRow = std::uint32_t (*)(const std::byte* codes, const std::byte* scales, std::byte* out);

template <RowKind kind>
std::uint32_t copy_row(const std::byte* codes, const std::byte* scales, std::byte* out) {
  std::memcpy(out, codes, code_bytes(kind));
  std::memcpy(out + code_bytes(kind), scales, kScaleBytes);
  return 0;
}

// FP4 as FP8: the same values.
std::uint32_t expand_row(const std::byte* codes, const std::byte* scales, std::byte* out) {
  static const ConvertRow expand =
      row_converter(RowKind::fp4, Format::packed_fp8, supported_simd().front());
  std::array<std::byte, packed_bytes(RowKind::fp4)> packed;
  copy_row<RowKind::fp4>(codes, scales, packed.data());
  expand(packed.data(), out);
  return 0;
}

PackRow row_packer(RowKind from, RowKind to) {
  if (from == to) return to == RowKind::fp4 ? copy_row<RowKind::fp4> : copy_row<RowKind::fp8>;
  return to == RowKind::fp4 ? quantise_row : expand_row;
}

// Packs every row to where place(i) says, and calls done(i, place) behind it.
template <typename Place, typename Done>
PackReport pack_each(const SourceRows& rows, std::uint64_t first, RowKind kind, Place place,
                     Done done) {
  const PackRow pack = row_packer(rows.kind, kind);
  PackReport report;
  for (std::size_t i = 0; i < rows.count; ++i) {
    const std::byte* codes = rows.codes + i * rows.codes_stride;
    const std::byte* scales = rows.scales + i * rows.scales_stride;
    if (const std::uint8_t why = suspicion(rows.kind, codes, scales); why != 0) [[unlikely]] {
      report.suspects.push_back({first + i, why});
    }
    std::byte* out = place(i);
    report.clipped_blocks += pack(codes, scales, out);
    done(i, out);
  }
  return report;
}

bool is_zero(const std::byte* begin, const std::byte* end) {
  return std::all_of(begin, end, [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

PackReport pack_rows(const SourceRows& rows, std::uint64_t first, RowKind kind, std::byte* out) {
  const auto place = [&](std::size_t i) { return out + i * packed_bytes(kind); };
  return pack_each(rows, first, kind, place, [](std::size_t, std::byte*) {});
}

PackReport seal_pages(const SourceRows& rows, std::uint64_t first, RowKind kind,
                      const RecordSeal& seal, std::uint64_t origin, std::byte* pages) {
  const RecordFormat format = RecordFormat::of(kind);
  const auto place = [&](std::size_t i) { return pages + format.offset_of(first + i - origin); };
  const auto done = [&](std::size_t i, std::byte* record) {
    const std::uint32_t crc = seal.of(first + i, record, format.row_bytes);
    std::memcpy(record + format.row_bytes, &crc, sizeof(crc));
    const bool last_of_page = (first + i - origin + 1) % format.records_per_page == 0;
    if (last_of_page || i + 1 == rows.count) {
      const auto end = static_cast<std::size_t>(record - pages) + format.record_bytes;
      std::memset(pages + end, 0, (kPageBytes - end % kPageBytes) % kPageBytes);
    }
  };
  return pack_each(rows, first, kind, place, done);
}

PageFaults check_pages(const std::byte* pages, std::uint64_t first, std::size_t count, RowKind kind,
                       const RecordSeal& seal) {
  const RecordFormat format = RecordFormat::of(kind);
  PageFaults faults;
  for (std::size_t begin = 0; begin < count; begin += format.records_per_page) {
    const std::byte* page = pages + format.offset_of(begin);
    const std::size_t rows = std::min(format.records_per_page, count - begin);
    for (std::size_t i = 0; i < rows; ++i) {
      const std::uint64_t row = first + begin + i;
      if (!seal.matches(row, page + i * format.record_bytes, format.row_bytes)) {
        faults.rows.push_back(row);
      }
    }
    if (!is_zero(page + rows * format.record_bytes, page + kPageBytes)) {
      faults.pages.push_back((first + begin) / format.records_per_page);
    }
  }
  return faults;
}

}  // namespace engram
