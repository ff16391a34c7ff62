// Row kinds and output formats: the sizes everything else is derived from.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engram {

// A row is 256 values; every 32 of them share one E8M0 scale byte.
inline constexpr std::size_t kRowValues = 256;
inline constexpr std::size_t kBlockValues = 32;
inline constexpr std::size_t kScaleBytes = kRowValues / kBlockValues;
static_assert(kScaleBytes == 8);

// How a table stores its codes.
enum class RowKind : std::uint8_t { fp4 = 0, fp8 = 1 };

// What a lookup returns: `packed` is the table's own bytes (codes, then scales).
enum class Format : std::uint8_t { packed = 0, packed_fp8 = 1, bf16 = 2, fp32 = 3 };
inline constexpr std::size_t kFormats = 4;
inline constexpr Format kAllFormats[kFormats] = {Format::packed, Format::packed_fp8, Format::bf16,
                                                 Format::fp32};

constexpr std::size_t code_bytes(RowKind kind) {
  return kind == RowKind::fp4 ? kRowValues / 2 : kRowValues;
}

// 136 for FP4, 264 for FP8.
constexpr std::size_t packed_bytes(RowKind kind) { return code_bytes(kind) + kScaleBytes; }

constexpr std::size_t output_bytes(RowKind kind, Format format) {
  switch (format) {
    case Format::packed:
      return packed_bytes(kind);
    case Format::packed_fp8:
      return packed_bytes(RowKind::fp8);
    case Format::bf16:
      return kRowValues * 2;
    case Format::fp32:
      return kRowValues * 4;
  }
  return 0;
}

static_assert(packed_bytes(RowKind::fp4) == 136 && packed_bytes(RowKind::fp8) == 264);

}  // namespace engram
