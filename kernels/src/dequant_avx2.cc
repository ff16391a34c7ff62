// AVX2 conversions, 32 values a step.
//
// Only functions marked ENGRAM_AVX2 hold AVX2 code, so this file needs no compiler flag and no
// inline function of a header can leak AVX2 into the rest.
#include "dequant_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstring>

#include "dequant_numbers.h"

#define ENGRAM_AVX2 [[gnu::target("avx2"), gnu::always_inline]] inline
#define ENGRAM_AVX2_ROW [[gnu::target("avx2")]]

namespace engram {
namespace {

// bf16 results of 16 codes under one scale byte, their low and their high bytes: two shuffle
// tables. For FP4 that is every code, so every scale byte costs the same and is exact; for FP8 the
// zero and the 7 subnormal magnitudes. 8 KiB each; a cache line per scale byte in use is warm.
struct alignas(32) ShuffleTable {
  std::array<std::uint8_t, 16> low;
  std::array<std::uint8_t, 16> high;
};

template <RowKind kind>
constexpr auto kShuffleTables = [] {
  std::array<ShuffleTable, 256> tables{};
  for (std::uint32_t scale = 0; scale < 256; ++scale) {
    for (std::uint32_t code = 0; code < 16; ++code) {
      const std::uint16_t bits = round_to_bf16(scaled_fp32(decode<kind>(code), scale));
      tables[scale].low[code] = static_cast<std::uint8_t>(bits);
      tables[scale].high[code] = static_cast<std::uint8_t>(bits >> 8);
    }
  }
  return tables;
}();

// The low and high bytes of 32 bf16 results.
struct Halves {
  __m256i low;
  __m256i high;
};

ENGRAM_AVX2 __m256i load_both_lanes(const void* bytes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}

ENGRAM_AVX2 __m256i splat(std::uint32_t value) {
  return _mm256_set1_epi8(static_cast<char>(value));
}

// Streaming takes a third less time on outputs far beyond the caches, but loses on the 1-MiB pieces
// that replies are made of, and whoever reads the piece next would wait for memory.
template <Stores stores>
ENGRAM_AVX2 void store_32(std::byte* out, __m256i value) {
  if constexpr (stores == Stores::streaming) {
    auto* const to = reinterpret_cast<__m128i*>(out);
    _mm_stream_si128(to, _mm256_castsi256_si128(value));
    _mm_stream_si128(to + 1, _mm256_extracti128_si256(value, 1));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), value);
  }
}

// The 32 codes of a block, one a byte, in row order.
template <RowKind kind>
ENGRAM_AVX2 __m256i load_codes(const std::byte* packed_row, std::size_t block) {
  const std::byte* codes = packed_row + block * code_bytes(kind) / kScaleBytes;
  if constexpr (kind == RowKind::fp8) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  } else {
    const __m256i pairs =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i apart = _mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4));
    return _mm256_and_si256(apart, splat(0x0F));  // low nibble first
  }
}

ENGRAM_AVX2 Halves fp4_results(__m256i codes, std::uint32_t scale) {
  const ShuffleTable& table = kShuffleTables<RowKind::fp4>[scale];
  return {_mm256_shuffle_epi8(load_both_lanes(table.low.data()), codes),
          _mm256_shuffle_epi8(load_both_lanes(table.high.data()), codes)};
}

// For scales in [kOrdinaryScaleMin, kOrdinaryScaleMax].
ENGRAM_AVX2 Halves fp8_results(__m256i codes, std::uint32_t scale) {
  const __m256i magnitude = _mm256_and_si256(codes, splat(0x7F));  // 0eeeemmm
  // bf16 is seeeeeee emmm0000. Add the scale's exponent in two parts: its lowest bit before the
  // magnitude is cut in two, so that the carry reaches the high byte; the others after.
  const std::uint32_t added = scale - 7;
  const __m256i sum = _mm256_add_epi8(magnitude, splat((added & 1) << 3));
  const __m256i low = _mm256_and_si256(_mm256_slli_epi16(sum, 4), splat(0xF0));
  const __m256i high =
      _mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(sum, 4), splat(0x0F)), splat(added >> 1));

  const ShuffleTable& table = kShuffleTables<RowKind::fp8>[scale];
  const __m256i low_subnormal = _mm256_shuffle_epi8(load_both_lanes(table.low.data()), magnitude);
  const __m256i high_subnormal = _mm256_shuffle_epi8(load_both_lanes(table.high.data()), magnitude);
  const __m256i is_subnormal = _mm256_cmpgt_epi8(splat(8), magnitude);
  const __m256i is_nan = _mm256_cmpeq_epi8(magnitude, splat(0x7F));
  const __m256i sign = _mm256_and_si256(codes, splat(0x80));
  const __m256i low_number = _mm256_blendv_epi8(low, low_subnormal, is_subnormal);
  const __m256i high_number =
      _mm256_or_si256(_mm256_blendv_epi8(high, high_subnormal, is_subnormal), sign);
  return {_mm256_blendv_epi8(low_number, splat(kBf16Nan & 0xFF), is_nan),
          _mm256_blendv_epi8(high_number, splat(kBf16Nan >> 8), is_nan)};
}

template <RowKind kind>
ENGRAM_AVX2 Halves results(__m256i codes, std::uint32_t scale) {
  return kind == RowKind::fp4 ? fp4_results(codes, scale) : fp8_results(codes, scale);
}

// Unpacking works inside 128-bit lanes. Codes are put in an order first that makes the results come
// out in row order.
template <RowKind kind, Stores stores>
ENGRAM_AVX2_ROW void to_bf16(const std::byte* packed_row, std::byte* out) {
  const std::byte* scales = packed_row + code_bytes(kind);
  if (kind == RowKind::fp8 && !has_ordinary_scales(scales)) [[unlikely]] {
    return fp8_to_bf16_scalar(packed_row, out);
  }
  const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const __m256i codes = _mm256_permutevar8x32_epi32(load_codes<kind>(packed_row, block), order);
    const Halves bf16 = results<kind>(codes, std::to_integer<std::uint32_t>(scales[block]));
    store_32<stores>(out + block * 64, _mm256_unpacklo_epi8(bf16.low, bf16.high));
    store_32<stores>(out + block * 64 + 32, _mm256_unpackhi_epi8(bf16.low, bf16.high));
  }
}

// Where this does not hand over to the scalar twin, bf16 holds every product exactly: it is the
// upper half of the float32.
template <RowKind kind, Stores stores>
ENGRAM_AVX2_ROW void to_fp32(const std::byte* packed_row, std::byte* out) {
  const std::byte* scales = packed_row + code_bytes(kind);
  if (kind == RowKind::fp8 && !has_ordinary_scales(scales)) [[unlikely]] {
    return fp8_to_fp32_scalar(packed_row, out);
  }
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i zero = _mm256_setzero_si256();
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const __m256i codes = _mm256_permutevar8x32_epi32(load_codes<kind>(packed_row, block), order);
    const Halves bf16 = results<kind>(codes, std::to_integer<std::uint32_t>(scales[block]));
    const __m256i first = _mm256_unpacklo_epi8(bf16.low, bf16.high);
    const __m256i second = _mm256_unpackhi_epi8(bf16.low, bf16.high);
    store_32<stores>(out + block * 128, _mm256_unpacklo_epi16(zero, first));
    store_32<stores>(out + block * 128 + 32, _mm256_unpackhi_epi16(zero, first));
    store_32<stores>(out + block * 128 + 64, _mm256_unpacklo_epi16(zero, second));
    store_32<stores>(out + block * 128 + 96, _mm256_unpackhi_epi16(zero, second));
  }
}

ENGRAM_AVX2_ROW void fp4_to_packed_fp8(const std::byte* packed_row, std::byte* out) {
  const __m256i fp8 = load_both_lanes(kFp4AsFp8.data());
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const __m256i codes = load_codes<RowKind::fp4>(packed_row, block);
    store_32<Stores::cached>(out + block * 32, _mm256_shuffle_epi8(fp8, codes));
  }
  std::memcpy(out + kRowValues, packed_row + code_bytes(RowKind::fp4), kScaleBytes);
}

template <Stores stores>
ConvertRow converter(RowKind kind, Format format) {
  const bool fp4 = kind == RowKind::fp4;
  if (format == Format::bf16) {
    return fp4 ? to_bf16<RowKind::fp4, stores> : to_bf16<RowKind::fp8, stores>;
  }
  if (format == Format::fp32) {
    return fp4 ? to_fp32<RowKind::fp4, stores> : to_fp32<RowKind::fp8, stores>;
  }
  const bool packs = format == Format::packed_fp8 && fp4 && stores == Stores::cached;
  return packs ? fp4_to_packed_fp8 : nullptr;
}

}  // namespace

ConvertRow avx2_converter(RowKind kind, Format format, Stores stores) {
  return stores == Stores::streaming ? converter<Stores::streaming>(kind, format)
                                     : converter<Stores::cached>(kind, format);
}

bool has_avx2() { return __builtin_cpu_supports("avx2"); }

}  // namespace engram

#else

namespace engram {

ConvertRow avx2_converter(RowKind, Format, Stores) { return nullptr; }
bool has_avx2() { return false; }

}  // namespace engram

#endif
