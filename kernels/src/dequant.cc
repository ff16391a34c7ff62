// The scalar twin of every conversion, and the choice of level.
#include "dequant.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "dequant_kernels.h"
#include "dequant_numbers.h"

namespace engram {
namespace {

static_assert(std::endian::native == std::endian::little, "rows are little-endian");

template <typename T>
void store(std::byte* out, std::size_t index, T value) {
  std::memcpy(out + index * sizeof(T), &value, sizeof(T));
}

// In steps of 16 bytes: compilers turn one memcpy of a fixed odd size into `rep movs`, which takes
// three times as long.
template <std::size_t bytes>
void copy_row(const std::byte* packed_row, std::byte* out) {
  static_assert(bytes % 16 == 8);
  for (std::size_t i = 0; i + 16 <= bytes; i += 16) std::memcpy(out + i, packed_row + i, 16);
  std::memcpy(out + bytes - 8, packed_row + bytes - 8, 8);
}

// ------------------------------------------------------------------------------------------- FP4

// bf16 bits of every code under every scale byte: 8 KiB, warm only for the scale bytes in use.
constexpr auto kFp4Bf16 = [] {
  std::array<std::array<std::uint16_t, 16>, 256> table{};
  for (std::uint32_t scale = 0; scale < 256; ++scale) {
    for (std::uint32_t code = 0; code < 16; ++code) {
      table[scale][code] = round_to_bf16(scaled_fp32(decode_fp4(code), scale));
    }
  }
  return table;
}();

// Calls emit(index, code, scale byte) for the 256 values of an FP4 row.
template <typename Emit>
void for_each_fp4(const std::byte* packed_row, Emit emit) {
  const std::byte* scales = packed_row + code_bytes(RowKind::fp4);
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const auto scale = std::to_integer<std::size_t>(scales[block]);
    for (std::size_t i = block * kBlockValues; i < (block + 1) * kBlockValues; i += 2) {
      const auto pair = std::to_integer<std::uint32_t>(packed_row[i / 2]);
      emit(i, pair & 15, scale);
      emit(i + 1, pair >> 4, scale);
    }
  }
}

void fp4_to_bf16(const std::byte* packed_row, std::byte* out) {
  for_each_fp4(packed_row, [out](std::size_t i, std::uint32_t code, std::size_t scale) {
    store(out, i, kFp4Bf16[scale][code]);
  });
}

// bf16 holds every FP4 product exactly, so its bits are the upper half of the float32.
void fp4_to_fp32(const std::byte* packed_row, std::byte* out) {
  for_each_fp4(packed_row, [out](std::size_t i, std::uint32_t code, std::size_t scale) {
    store(out, i, std::uint32_t{kFp4Bf16[scale][code]} << 16);
  });
}

void fp4_to_packed_fp8(const std::byte* packed_row, std::byte* out) {
  for_each_fp4(packed_row, [out](std::size_t i, std::uint32_t code, std::size_t) {
    store(out, i, kFp4AsFp8[code]);
  });
  std::memcpy(out + kRowValues, packed_row + code_bytes(RowKind::fp4), kScaleBytes);
}

// ------------------------------------------------------------------------------------------- FP8

struct Fp8Code {
  std::uint16_t bf16;  // under a scale of 1
  std::uint16_t mask;  // what of the added exponent it takes: nothing if zero or NaN, else all
};

constexpr auto kFp8Codes = [] {
  std::array<Fp8Code, 256> table{};
  for (std::uint32_t code = 0; code < 256; ++code) {
    const Decoded value = decode_fp8(code);
    const bool fixed = value.nan || value.significand == 0;
    table[code].bf16 = round_to_bf16(scaled_fp32(value, kScaleOne));
    table[code].mask = fixed ? 0 : 0xFFFF;
  }
  return table;
}();

// Calls ordinary(index, bf16 bits) or, under a scale byte outside the ordinary ones,
// extreme(index, float32 bits) for the 256 values of an FP8 row.
template <typename Ordinary, typename Extreme>
void for_each_fp8(const std::byte* packed_row, Ordinary ordinary, Extreme extreme) {
  const std::byte* scales = packed_row + code_bytes(RowKind::fp8);
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const auto scale = std::to_integer<std::uint32_t>(scales[block]);
    const std::size_t first = block * kBlockValues, end = first + kBlockValues;
    if (scale < kOrdinaryScaleMin || scale > kOrdinaryScaleMax) [[unlikely]] {
      for (std::size_t i = first; i < end; ++i) {
        const auto code = std::to_integer<std::uint32_t>(packed_row[i]);
        extreme(i, scaled_fp32(decode_fp8(code), scale));
      }
      continue;
    }
    const std::uint32_t added = (scale - kScaleOne) << 7;
    for (std::size_t i = first; i < end; ++i) {
      const Fp8Code code = kFp8Codes[std::to_integer<std::size_t>(packed_row[i])];
      ordinary(i, static_cast<std::uint16_t>(code.bf16 + (added & code.mask)));
    }
  }
}

// ---------------------------------------------------------------------------------------- choice

ConvertRow scalar_converter(RowKind kind, Format format) {
  const bool fp4 = kind == RowKind::fp4;
  switch (format) {
    case Format::packed:
      return fp4 ? copy_row<packed_bytes(RowKind::fp4)> : copy_row<packed_bytes(RowKind::fp8)>;
    case Format::packed_fp8:
      return fp4 ? fp4_to_packed_fp8 : copy_row<packed_bytes(RowKind::fp8)>;
    case Format::bf16:
      return fp4 ? fp4_to_bf16 : fp8_to_bf16_scalar;
    case Format::fp32:
      return fp4 ? fp4_to_fp32 : fp8_to_fp32_scalar;
  }
  throw std::invalid_argument("unknown row format");
}

}  // namespace

void fp8_to_bf16_scalar(const std::byte* packed_row, std::byte* out) {
  for_each_fp8(
      packed_row, [out](std::size_t i, std::uint16_t bf16) { store(out, i, bf16); },
      [out](std::size_t i, std::uint32_t fp32) { store(out, i, round_to_bf16(fp32)); });
}

void fp8_to_fp32_scalar(const std::byte* packed_row, std::byte* out) {
  for_each_fp8(
      packed_row,
      [out](std::size_t i, std::uint16_t bf16) { store(out, i, std::uint32_t{bf16} << 16); },
      [out](std::size_t i, std::uint32_t fp32) { store(out, i, fp32); });
}

std::string_view simd_name(Simd simd) {
  switch (simd) {
    case Simd::scalar:
      return "scalar";
    case Simd::avx2:
      return "avx2";
    case Simd::avx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<Simd> supported_simd() {
  std::vector<Simd> levels;
  if (has_avx512()) levels.push_back(Simd::avx512);
  if (has_avx2()) levels.push_back(Simd::avx2);
  levels.push_back(Simd::scalar);
  return levels;
}

namespace {

// What a SIMD level has of its own; null = nothing.
ConvertRow simd_converter(RowKind kind, Format format, Stores stores, Simd simd) {
  const std::vector<Simd> supported = supported_simd();
  if (std::find(supported.begin(), supported.end(), simd) == supported.end()) {
    throw std::invalid_argument("this CPU lacks " + std::string(simd_name(simd)));
  }
  if (simd == Simd::avx512) return avx512_converter(kind, format, stores);
  return simd == Simd::avx2 ? avx2_converter(kind, format, stores) : nullptr;
}

}  // namespace

ConvertRow row_converter(RowKind kind, Format format, Simd simd) {
  const ConvertRow fast = simd_converter(kind, format, Stores::cached, simd);
  return fast != nullptr ? fast : scalar_converter(kind, format);
}

ConvertRow streaming_converter(RowKind kind, Format format, Simd simd) {
  return simd_converter(kind, format, Stores::streaming, simd);
}

}  // namespace engram
