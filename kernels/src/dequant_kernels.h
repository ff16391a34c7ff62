// What the sources of dequant share among themselves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dequant.h"

namespace engram {

// The scalar twins, for the rare rows a SIMD level leaves to them.
void fp8_to_bf16_scalar(const std::byte* packed_row, std::byte* out);
void fp8_to_fp32_scalar(const std::byte* packed_row, std::byte* out);

// Whether this CPU and operating system run AVX2; false on other architectures.
bool has_avx2();

// The AVX2 converter of a pair, or null where nothing beats the scalar one (copies).
ConvertRow avx2_converter(RowKind kind, Format format);

}  // namespace engram
