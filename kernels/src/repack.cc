#include "repack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace engram {
namespace {

constexpr std::uint32_t kFp8Codes = 127;  // magnitudes; 127 itself is NaN
constexpr std::size_t kPairs = kBlockValues / 2;

// Magnitude of an FP8 code in units of 2^-9, the smallest of them; they ascend with the code.
constexpr std::uint64_t fp8_magnitude(std::uint32_t code) {
  const std::uint32_t exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? mantissa : std::uint64_t{8 + mantissa} << (exponent - 1);
}
constexpr std::uint64_t kFp8One = 1 << 9;

// Twice and four times what FP4 codes stand for, so that both are whole.
constexpr std::array<std::uint64_t, 8> kFp4Doubled = {0, 1, 2, 3, 4, 6, 8, 12};
constexpr std::array<std::uint64_t, 7> kFp4Midpoints = {1, 3, 5, 7, 10, 14, 20};
constexpr std::uint64_t kFp4Max = 6;

// By an FP8 block's largest code: the power of two that its scale grows by. A block of zeros and
// one with a NaN have entries that harm nothing.
constexpr auto kScaleStep = [] {
  std::array<std::int8_t, kFp8Codes + 1> steps{};
  for (std::uint32_t code = 0; code <= kFp8Codes; ++code) {
    const std::uint64_t magnitude = fp8_magnitude(std::clamp(code, 1u, kFp8Codes - 1));
    std::int8_t step = -11;
    while ((kFp4Max * kFp8One << (step + 11)) < magnitude << 11) ++step;
    steps[code] = step;
  }
  return steps;
}();

// Between an FP8 scale and its FP4 scale lie these powers of two, clamping included.
constexpr int kShiftMin = -7, kShiftMax = 11;
static_assert(kScaleStep[1] == -kShiftMax && kScaleStep[126] == -kShiftMin);

// The compiler's own vectors, of a size that every CPU has registers for.
constexpr std::size_t kLanes = 16;
using Lanes = std::int8_t __attribute__((vector_size(kLanes)));

// [i]: the largest FP8 code whose value does not exceed the i-th midpoint of FP4, in all lanes. A
// value's FP4 code is the number of these that its own code exceeds: ties stay below, which is
// toward zero. So all of it is comparing bytes.
using Thresholds = std::array<std::array<std::int8_t, kLanes>, kFp4Midpoints.size()>;

// By the power of two between an FP8 scale and its FP4 scale, less kShiftMin.
constexpr auto kThresholds = [] {
  std::array<Thresholds, kShiftMax - kShiftMin + 1> table{};
  for (int shift = kShiftMin; shift <= kShiftMax; ++shift) {
    for (std::size_t i = 0; i < kFp4Midpoints.size(); ++i) {
      const std::uint64_t midpoint = (kFp4Midpoints[i] * kFp8One / 4) << -kShiftMin;
      std::uint32_t code = 0;
      while (code + 1 < kFp8Codes && fp8_magnitude(code + 1) << (shift - kShiftMin) <= midpoint) {
        ++code;
      }
      table[static_cast<std::size_t>(shift - kShiftMin)][i].fill(static_cast<std::int8_t>(code));
    }
  }
  return table;
}();

std::uint8_t largest_magnitude(const std::byte* codes) {
  std::uint8_t largest = 0;
  for (std::size_t i = 0; i < kBlockValues; ++i) {
    largest = std::max(largest, static_cast<std::uint8_t>(std::to_integer<int>(codes[i]) & 0x7F));
  }
  return largest;
}

// 8 codes, one a byte -> 4 bytes, low nibble first.
std::uint32_t join_nibbles(std::uint64_t codes) {
  codes = (codes | codes >> 4) & 0x00FF00FF00FF00FF;
  codes = (codes | codes >> 8) & 0x0000FFFF0000FFFF;
  return static_cast<std::uint32_t>(codes | codes >> 16);
}

// 16 FP8 codes -> 8 bytes of FP4 codes.
void quantise_codes(const std::byte* codes, const Thresholds& thresholds, std::byte* out) {
  Lanes fp8;
  std::memcpy(&fp8, codes, sizeof(fp8));
  const Lanes magnitude = fp8 & 0x7F;
  Lanes fp4 = (fp8 < 0) & 8;
  for (const auto& threshold : thresholds) {
    Lanes bound;
    std::memcpy(&bound, threshold.data(), sizeof(bound));
    fp4 -= magnitude > bound;  // a comparison that holds is -1
  }
  std::array<std::uint64_t, 2> halves;
  std::memcpy(halves.data(), &fp4, sizeof(fp4));
  const std::array joined = {join_nibbles(halves[0]), join_nibbles(halves[1])};
  std::memcpy(out, joined.data(), sizeof(joined));
}

constexpr auto kFp8Values = [] {
  std::array<double, 256> values{};
  for (std::uint32_t code = 0; code < 256; ++code) {
    const double magnitude = static_cast<double>(fp8_magnitude(code & 0x7F)) / kFp8One;
    values[code] = code & 0x80 ? -magnitude : magnitude;
  }
  return values;
}();

constexpr auto kFp4Values = [] {
  std::array<double, 16> values{};
  for (std::uint32_t code = 0; code < 16; ++code) {
    const double magnitude = static_cast<double>(kFp4Doubled[code & 7]) / 2;
    values[code] = code & 8 ? -magnitude : magnitude;
  }
  return values;
}();

double scale_value(std::byte scale) {
  const int byte = std::to_integer<int>(scale);
  return byte == 0 ? 0.0 : std::ldexp(1.0, byte - 127);
}

}  // namespace

std::uint8_t suspicion(RowKind kind, const std::byte* codes, const std::byte* scales) {
  std::uint8_t infinite = 0, nan = 0;
  for (std::size_t i = 0; i < kScaleBytes; ++i) infinite |= scales[i] == std::byte{0xFF};
  if (kind == RowKind::fp8) {
    for (std::size_t i = 0; i < kRowValues; ++i)
      nan |= (codes[i] | std::byte{0x80}) == std::byte{0xFF};
  }
  return static_cast<std::uint8_t>(nan * kNanCode | infinite * kScale255);
}

std::uint32_t quantise_row(const std::byte* codes, const std::byte* scales, std::byte* packed_fp4) {
  std::byte* scales_out = packed_fp4 + code_bytes(RowKind::fp4);
  std::uint32_t clipped = 0;
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const std::byte* block_codes = codes + block * kBlockValues;
    std::byte* block_out = packed_fp4 + block * kPairs;
    const std::uint8_t largest = largest_magnitude(block_codes);
    const int scale = std::to_integer<int>(scales[block]);
    if (largest == 0 || scale == 0) {
      std::memset(block_out, 0, kPairs);  // without the signs of zeros
      scales_out[block] = std::byte{0};
      continue;
    }
    const int wanted = scale + kScaleStep[largest];
    const int fp4_scale = std::clamp(wanted, 1, 254);
    clipped += wanted > fp4_scale;
    const auto& thresholds = kThresholds[static_cast<std::size_t>(scale - fp4_scale - kShiftMin)];
    for (std::size_t i = 0; i < kBlockValues; i += kLanes) {
      quantise_codes(block_codes + i, thresholds, block_out + i / 2);
    }
    scales_out[block] = static_cast<std::byte>(fp4_scale);
  }
  return clipped;
}

double row_cosine(const std::byte* codes, const std::byte* scales, const std::byte* packed_fp4) {
  const std::byte* fp4_scales = packed_fp4 + code_bytes(RowKind::fp4);
  double product = 0, fp8_square = 0, fp4_square = 0;
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const double fp8_scale = scale_value(scales[block]), fp4_scale = scale_value(fp4_scales[block]);
    double block_product = 0, block_fp8 = 0, block_fp4 = 0;
    for (std::size_t i = block * kBlockValues; i < (block + 1) * kBlockValues; ++i) {
      const auto pair = std::to_integer<std::uint32_t>(packed_fp4[i / 2]);
      const double fp8 = kFp8Values[std::to_integer<std::size_t>(codes[i])];
      const double fp4 = kFp4Values[i % 2 == 0 ? pair & 15 : pair >> 4];
      block_product += fp8 * fp4;
      block_fp8 += fp8 * fp8;
      block_fp4 += fp4 * fp4;
    }
    product += block_product * fp8_scale * fp4_scale;
    fp8_square += block_fp8 * fp8_scale * fp8_scale;
    fp4_square += block_fp4 * fp4_scale * fp4_scale;
  }
  if (fp8_square == 0 && fp4_square == 0) return 1;
  if (fp8_square == 0 || fp4_square == 0) return 0;
  return product / (std::sqrt(fp8_square) * std::sqrt(fp4_square));
}

}  // namespace engram
