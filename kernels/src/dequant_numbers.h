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
inline constexpr std::uint8_t kScaleZero = 0;        // E8M0: float32 bits b << 23, hence 0.0 ...
inline constexpr std::uint8_t kScaleInfinity = 255;  // ... and infinity at the two ends.

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

// float32 bits of value * scale. Never rounds: the smallest product is 2^-9 * 2^-126, a multiple of
// float32's 2^-149, and a significand has 4 bits.
constexpr std::uint32_t scaled_fp32(Decoded value, std::uint8_t scale) {
  const std::uint32_t sign = value.negative ? 0x80000000u : 0;
  const bool zero = value.significand == 0;
  if (value.nan || (zero && scale == kScaleInfinity)) return kFp32Nan;
  if (scale == kScaleInfinity) return sign | kFp32Infinity;
  if (zero || scale == kScaleZero) return sign;
  const int leading = int(std::bit_width(value.significand)) - 1;
  const int ulp = value.exponent + scale - 127;  // the product is significand * 2^ulp
  const int exponent = ulp + leading;
  if (exponent > 127) return sign | kFp32Infinity;
  if (exponent < -126) return sign | value.significand << (ulp + 149);
  const std::uint32_t mantissa = (value.significand << (23 - leading)) & 0x7FFFFF;
  return sign | std::uint32_t(exponent + 127) << 23 | mantissa;
}

// Nearest, ties to even. Rounding up the largest finite values gives infinity, as it should.
constexpr std::uint16_t round_to_bf16(std::uint32_t fp32) {
  if ((fp32 & 0x7FFFFFFF) > kFp32Infinity) return kFp32Nan >> 16;
  return std::uint16_t((fp32 + 0x7FFF + ((fp32 >> 16) & 1)) >> 16);
}

// The E4M3 byte of an FP4 code: the same value under the same scale.
constexpr std::uint8_t fp4_to_fp8(std::uint32_t code) {
  const std::uint32_t magnitude = code & 7;
  const std::uint32_t fp8 = magnitude == 0 ? 0 : magnitude == 1 ? 0x30 : 0x30 + 4 * magnitude;
  return std::uint8_t((code & 8) << 4 | fp8);
}

}  // namespace engram
