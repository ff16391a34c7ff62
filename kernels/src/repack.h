// Rows of one kind made into rows of another, and what is checked of a row on the way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format.h"

namespace engram {

// What makes a row suspect: the released tables have none of these.
inline constexpr std::uint8_t kNanCode = 1;   // an FP8 code 0x7F or 0xFF
inline constexpr std::uint8_t kScale255 = 2;  // a scale byte that means infinity

// The reasons why a row is suspect, or-ed; 0 for a sound one.
std::uint8_t suspicion(RowKind kind, const std::byte* codes, const std::byte* scales);

// FP8 -> FP4 by the public re-pack's rule, block by block: the scale is the smallest power of two
// that is at least amax / 6; codes are rounded to nearest, ties toward zero; a block of zeros
// (codes or scale byte 0) is zeros; a scale byte lies in 1..254 otherwise. Writes 128 bytes of
// codes, then 8 of scales. Returns the number of blocks in which a value was too large for scale
// byte 254. A suspect row gives a row of finite values and no error.
std::uint32_t quantise_row(const std::byte* codes, const std::byte* scales, std::byte* packed_fp4);

// Cosine of the angle between an FP8 row and its packed FP4 form; 1 for two rows of zeros.
double row_cosine(const std::byte* codes, const std::byte* scales, const std::byte* packed_fp4);

}  // namespace engram
