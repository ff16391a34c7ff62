// The number formats of a row, in integer arithmetic: FP4 (E2M1) and FP8 (E4M3FN) codes times an
// E8M0 scale byte, as float32 and bfloat16 bits.
//
// Floats would do for ordinary rows, but not for results below 2^-126: a host process may have set
// flush-to-zero (torch.set_flush_denormal), and a row must not depend on that.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "format.h"

namespace engram {

inline constexpr std::uint32_t kFp32Infinity = 0x7F800000;
inline constexpr std::uint32_t kFp32Nan = 0x7FC00000;
inline constexpr std::uint16_t kBf16Nan = kFp32Nan >> 16;

// The scale is the float32 with bits b << 23: a power of two, but 0.0 and infinity at the two ends.
inline constexpr std::uint32_t kScaleZero = 0;
inline constexpr std::uint32_t kScaleOne = 127;
inline constexpr std::uint32_t kScaleInfinity = 255;

// Between these, every product of a non-zero number with an FP8 code is a normal one (magnitudes
// reach from 2^-9 to 1.75 * 2^8): bf16 holds it exactly, and scaling is an addition to the
// exponent. The others are as exact, and slower.
inline constexpr std::uint32_t kOrdinaryScaleMin = 10;
inline constexpr std::uint32_t kOrdinaryScaleMax = 246;

// A code's value: significand * 2^exponent, or NaN.
struct Decoded {
  bool negative;
  bool nan;
  std::uint32_t significand;  // 0..15
  int exponent;
};

// FP4 E2M1: sign, 2 exponent bits (bias 1), 1 mantissa bit; no NaN.
constexpr Decoded decode_fp4(std::uint32_t code) {
  const std::uint32_t field = (code >> 1) & 3, mantissa = code & 1;
  const bool normal = field != 0;
  return {(code & 8) != 0, false, normal ? mantissa | 2 : mantissa, normal ? int(field) - 2 : -1};
}

// FP8 E4M3FN: sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN, no infinity.
constexpr Decoded decode_fp8(std::uint32_t code) {
  const std::uint32_t field = (code >> 3) & 15, mantissa = code & 7;
  const bool normal = field != 0;
  return {(code & 0x80) != 0, (code & 0x7F) == 0x7F, normal ? mantissa | 8 : mantissa,
          normal ? int(field) - 10 : -9};
}

template <RowKind kind>
constexpr Decoded decode(std::uint32_t code) {
  return kind == RowKind::fp4 ? decode_fp4(code) : decode_fp8(code);
}

// float32 bits of value * scale. Never rounds: the smallest product is 2^-9 * 2^-126, a multiple of
// float32's 2^-149, and a significand has 4 bits.
constexpr std::uint32_t scaled_fp32(Decoded value, std::uint32_t scale) {
  const std::uint32_t sign = value.negative ? 0x80000000u : 0;
  const bool zero = value.significand == 0;
  if (value.nan || (zero && scale == kScaleInfinity)) return kFp32Nan;
  if (scale == kScaleInfinity) return sign | kFp32Infinity;
  if (zero || scale == kScaleZero) return sign;
  const int leading = int(std::bit_width(value.significand)) - 1;
  const int ulp = value.exponent + int(scale) - 127;  // the product is significand * 2^ulp
  const int exponent = ulp + leading;
  if (exponent > 127) return sign | kFp32Infinity;
  if (exponent < -126) return sign | value.significand << (ulp + 149);
  const std::uint32_t mantissa = (value.significand << (23 - leading)) & 0x7FFFFF;
  return sign | std::uint32_t(exponent + 127) << 23 | mantissa;
}

// Nearest, ties to even. Rounding up the largest finite values gives infinity, as it should.
constexpr std::uint16_t round_to_bf16(std::uint32_t fp32) {
  if ((fp32 & 0x7FFFFFFF) > kFp32Infinity) return kBf16Nan;
  return std::uint16_t((fp32 + 0x7FFF + ((fp32 >> 16) & 1)) >> 16);
}

// The E4M3 byte of each FP4 code: the same value under the same scale.
inline constexpr std::array<std::uint8_t, 16> kFp4AsFp8 = {
    0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C, 0x80, 0xB0, 0xB8, 0xBC, 0xC0, 0xC4, 0xC8, 0xCC};

}  // namespace engram
