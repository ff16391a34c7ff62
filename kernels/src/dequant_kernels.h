// What the sources of dequant share among themselves.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "dequant.h"
#include "dequant_numbers.h"

namespace engram {

// The scalar twins, for the rare rows a SIMD level leaves to them.
void fp8_to_bf16_scalar(const std::byte* packed_row, std::byte* out);
void fp8_to_fp32_scalar(const std::byte* packed_row, std::byte* out);

#ifdef __SSE2__
// Whether all 8 scale bytes lie in [kOrdinaryScaleMin, kOrdinaryScaleMax].
[[gnu::always_inline]] inline bool has_ordinary_scales(const std::byte* scales) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
  const __m128i over = _mm_subs_epu8(bytes, _mm_set1_epi8(static_cast<char>(kOrdinaryScaleMax)));
  const __m128i under = _mm_subs_epu8(_mm_set1_epi8(kOrdinaryScaleMin), bytes);
  return _mm_cvtsi128_si64(_mm_or_si128(over, under)) == 0;
}
#endif

// Where a level's results go: see row_converter() and streaming_converter().
enum class Stores : bool { cached, streaming };

// Whether this CPU and operating system run a level; false on other architectures.
bool has_avx2();
bool has_avx512();

// A level's converter of a pair. Null: the scalar one is as good (copies), or nothing streams.
ConvertRow avx2_converter(RowKind kind, Format format, Stores stores);
ConvertRow avx512_converter(RowKind kind, Format format, Stores stores);

}  // namespace engram
