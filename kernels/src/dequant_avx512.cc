// AVX-512 conversions, a cache line of 32 bf16 values a step: one shuffle of 16-bit words looks up
// all 16 FP4 codes under a scale byte. F and BW are enough.
//
// Only functions marked ENGRAM_AVX512 hold AVX-512 code; see dequant_avx2.cc.
#include "dequant_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "dequant_numbers.h"

// GCC 12 takes the values that its own header leaves undefined on purpose for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#define ENGRAM_AVX512 [[gnu::target("avx512f,avx512bw"), gnu::always_inline]] inline
#define ENGRAM_AVX512_ROW [[gnu::target("avx512f,avx512bw")]]

namespace engram {
namespace {

// bf16 results of 16 codes under every scale byte: for FP4 that is every code, so every scale byte
// costs the same and is exact; for FP8 the zero, the 7 subnormal magnitudes, and 8 more that nobody
// asks for. 8 KiB each; half a cache line per scale byte in use is warm.
template <RowKind kind>
alignas(32) constexpr auto kWords = [] {
  std::array<std::array<std::uint16_t, 16>, 256> table{};
  for (std::uint32_t scale = 0; scale < 256; ++scale) {
    for (std::uint32_t code = 0; code < 16; ++code) {
      table[scale][code] = round_to_bf16(scaled_fp32(decode<kind>(code), scale));
    }
  }
  return table;
}();

// A table of 16 words twice: what bit 4 of an index is does not matter, nor any bit above it.
template <RowKind kind>
ENGRAM_AVX512 __m512i load_words(std::uint32_t scale) {
  const auto* words = reinterpret_cast<const __m256i*>(kWords<kind>[scale].data());
  return _mm512_broadcast_i64x4(_mm256_load_si256(words));
}

ENGRAM_AVX512 __m512i splat(std::uint32_t word) {
  return _mm512_set1_epi16(static_cast<short>(word));
}

// Streaming in quarters of a cache line, as outputs lie at multiples of 16: the CPU puts them
// together.
template <Stores stores>
ENGRAM_AVX512 void store_64(std::byte* out, __m512i value) {
  if constexpr (stores == Stores::streaming) {
    auto* const to = reinterpret_cast<__m128i*>(out);
    _mm_stream_si128(to, _mm512_castsi512_si128(value));
    _mm_stream_si128(to + 1, _mm512_extracti32x4_epi32(value, 1));
    _mm_stream_si128(to + 2, _mm512_extracti32x4_epi32(value, 2));
    _mm_stream_si128(to + 3, _mm512_extracti32x4_epi32(value, 3));
  } else {
    _mm512_storeu_si512(out, value);
  }
}

// bf16 results of the 32 codes of a block, in row order.
ENGRAM_AVX512 __m512i fp4_results(const std::byte* codes, std::uint32_t scale) {
  const __m512i pairs =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  // The low nibble where the lower word has its index, the high one where the upper word has.
  const __m512i apart = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
  return _mm512_permutexvar_epi16(apart, load_words<RowKind::fp4>(scale));
}

// For scales in [kOrdinaryScaleMin, kOrdinaryScaleMax].
ENGRAM_AVX512 __m512i fp8_results(const std::byte* bytes, std::uint32_t scale) {
  const __m512i codes =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
  const __m512i magnitude = _mm512_and_si512(codes, splat(0x7F));  // 0eeeemmm
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), splat((scale - 7) << 7));
  const __m512i number =
      _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epu16_mask(magnitude, splat(8)), magnitude,
                                    load_words<RowKind::fp8>(scale));
  const __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(codes, magnitude), 8);
  return _mm512_mask_mov_epi16(_mm512_or_si512(number, sign),
                               _mm512_cmpeq_epi16_mask(magnitude, splat(0x7F)), splat(kBf16Nan));
}

template <RowKind kind>
ENGRAM_AVX512 __m512i results(const std::byte* packed_row, std::size_t block) {
  const std::byte* codes = packed_row + block * code_bytes(kind) / kScaleBytes;
  const auto scale = std::to_integer<std::uint32_t>(packed_row[code_bytes(kind) + block]);
  return kind == RowKind::fp4 ? fp4_results(codes, scale) : fp8_results(codes, scale);
}

template <RowKind kind, Stores stores>
ENGRAM_AVX512_ROW void to_bf16(const std::byte* packed_row, std::byte* out) {
  if (kind == RowKind::fp8 && !has_ordinary_scales(packed_row + code_bytes(kind))) [[unlikely]] {
    return fp8_to_bf16_scalar(packed_row, out);
  }
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    store_64<stores>(out + block * 64, results<kind>(packed_row, block));
  }
}

// Where this does not hand over to the scalar twin, bf16 holds every product exactly: it is the
// upper half of the float32.
template <RowKind kind, Stores stores>
ENGRAM_AVX512_ROW void to_fp32(const std::byte* packed_row, std::byte* out) {
  if (kind == RowKind::fp8 && !has_ordinary_scales(packed_row + code_bytes(kind))) [[unlikely]] {
    return fp8_to_fp32_scalar(packed_row, out);
  }
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const __m512i bf16 = results<kind>(packed_row, block);
    const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bf16));
    const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bf16, 1));
    store_64<stores>(out + block * 128, _mm512_slli_epi32(first, 16));
    store_64<stores>(out + block * 128 + 64, _mm512_slli_epi32(second, 16));
  }
}

ENGRAM_AVX512_ROW void fp4_to_packed_fp8(const std::byte* packed_row, std::byte* out) {
  const __m512i fp8 =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4AsFp8.data())));
  for (std::size_t at = 0; at < kRowValues; at += 64) {
    const __m512i pairs = _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed_row + at / 2)));
    const __m512i apart = _mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4));
    const __m512i codes = _mm512_and_si512(apart, splat(0x0F0F));  // low nibble first
    _mm512_storeu_si512(out + at, _mm512_shuffle_epi8(fp8, codes));
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

ConvertRow avx512_converter(RowKind kind, Format format, Stores stores) {
  return stores == Stores::streaming ? converter<Stores::streaming>(kind, format)
                                     : converter<Stores::cached>(kind, format);
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

}  // namespace engram

#else

namespace engram {

ConvertRow avx512_converter(RowKind, Format, Stores) { return nullptr; }
bool has_avx512() { return false; }

}  // namespace engram

#endif
