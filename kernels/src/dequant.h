// Converting one packed row (codes, then 8 scale bytes) into the format a lookup asked for.
//
// Bit-exact at every SIMD level, for every code under every scale byte, and independent of the
// thread's floating-point mode: what is computed is computed on bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "format.h"

namespace engram {

enum class Simd : std::uint8_t { scalar, avx2, avx512 };

std::string_view simd_name(Simd simd);

// The levels this CPU can run, best first; scalar is always the last.
std::vector<Simd> supported_simd();

// Converts one row: packed_bytes(kind) in, output_bytes(kind, format) out. Any alignment; the two
// must not overlap. Thread-safe.
using ConvertRow = void (*)(const std::byte* packed_row, std::byte* out);

// The converter for a pair; every pair has one. Format::packed is a copy, as is FP8 to packed FP8.
// Throws std::invalid_argument when this CPU lacks `simd`. Look it up once, not per row.
ConvertRow row_converter(RowKind kind, Format format, Simd simd = supported_simd().front());

// The same past the CPU's caches, for more bytes than those could keep: `out` must lie at a
// multiple of kStreamAlignment, and a store fence must come after the last row. Null where there is
// none: for copies, packed FP8, and the scalar level.
inline constexpr std::size_t kStreamAlignment = 16;
ConvertRow streaming_converter(RowKind kind, Format format, Simd simd = supported_simd().front());

}  // namespace engram
