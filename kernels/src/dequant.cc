// The scalar twin of every conversion, and the choice of level.
#include "dequant.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "dequant_numbers.h"

namespace engram {
namespace {

static_assert(std::endian::native == std::endian::little, "rows are little-endian");

constexpr auto kFp4Bf16 = [] {
  std::array<std::array<std::uint16_t, 16>, 256> table{};
  for (unsigned scale = 0; scale < 256; ++scale) {
    for (unsigned code = 0; code < 16; ++code) {
      table[scale][code] =
          round_to_bf16(scaled_fp32(decode_fp4(code), static_cast<std::uint8_t>(scale)));
    }
  }
  return table;
}();

template <typename T>
void store(std::byte* out, std::size_t index, T value) {
  std::memcpy(out + index * sizeof(T), &value, sizeof(T));
}

template <std::size_t bytes>
void copy_row(const std::byte* packed_row, std::byte* out) {
  std::memcpy(out, packed_row, bytes);
}

// Calls emit(index, code, scale) for the 256 values of a row.
template <RowKind kind, typename Emit>
void for_each_value(const std::byte* packed_row, Emit emit) {
  const std::byte* scales = packed_row + code_bytes(kind);
  for (std::size_t block = 0; block < kScaleBytes; ++block) {
    const auto scale = std::to_integer<std::uint8_t>(scales[block]);
    for (std::size_t i = block * kBlockValues; i < (block + 1) * kBlockValues; ++i) {
      if constexpr (kind == RowKind::fp4) {
        const auto pair = std::to_integer<std::uint32_t>(packed_row[i / 2]);
        emit(i, i % 2 == 0 ? pair & 15 : pair >> 4, scale);
      } else {
        emit(i, std::to_integer<std::uint32_t>(packed_row[i]), scale);
      }
    }
  }
}

void fp4_to_bf16(const std::byte* packed_row, std::byte* out) {
  for_each_value<RowKind::fp4>(packed_row, [out](auto i, auto code, auto scale) {
    store<std::uint16_t>(out, i, kFp4Bf16[scale][code]);
  });
}

void fp4_to_fp32(const std::byte* packed_row, std::byte* out) {
  for_each_value<RowKind::fp4>(packed_row, [out](auto i, auto code, auto scale) {
    // FP4 has 2-bit significands and never comes below 2^-127: bf16 already holds it exactly.
    store<std::uint32_t>(out, i, std::uint32_t{kFp4Bf16[scale][code]} << 16);
  });
}

void fp4_to_packed_fp8(const std::byte* packed_row, std::byte* out) {
  for_each_value<RowKind::fp4>(packed_row, [out](auto i, auto code, auto) {
    store<std::uint8_t>(out, i, fp4_to_fp8(code));
  });
  std::memcpy(out + kRowValues, packed_row + code_bytes(RowKind::fp4), kScaleBytes);
}

void fp8_to_bf16(const std::byte* packed_row, std::byte* out) {
  for_each_value<RowKind::fp8>(packed_row, [out](auto i, auto code, auto scale) {
    store<std::uint16_t>(out, i, round_to_bf16(scaled_fp32(decode_fp8(code), scale)));
  });
}

void fp8_to_fp32(const std::byte* packed_row, std::byte* out) {
  for_each_value<RowKind::fp8>(packed_row, [out](auto i, auto code, auto scale) {
    store<std::uint32_t>(out, i, scaled_fp32(decode_fp8(code), scale));
  });
}

ConvertRow scalar_converter(RowKind kind, Format format) {
  const bool fp4 = kind == RowKind::fp4;
  switch (format) {
    case Format::packed:
      return fp4 ? copy_row<packed_bytes(RowKind::fp4)> : copy_row<packed_bytes(RowKind::fp8)>;
    case Format::packed_fp8:
      return fp4 ? fp4_to_packed_fp8 : copy_row<packed_bytes(RowKind::fp8)>;
    case Format::bf16:
      return fp4 ? fp4_to_bf16 : fp8_to_bf16;
    case Format::fp32:
      return fp4 ? fp4_to_fp32 : fp8_to_fp32;
  }
  throw std::invalid_argument("unknown row format");
}

}  // namespace

std::string_view simd_name(Simd simd) {
  switch (simd) {
    case Simd::scalar:
      return "scalar";
    case Simd::avx2:
      return "avx2";
  }
  return "unknown";
}

std::vector<Simd> supported_simd() { return {Simd::scalar}; }

ConvertRow row_converter(RowKind kind, Format format, Simd simd) {
  const std::vector<Simd> supported = supported_simd();
  if (std::find(supported.begin(), supported.end(), simd) == supported.end()) {
    throw std::invalid_argument("this CPU lacks " + std::string(simd_name(simd)));
  }
  return scalar_converter(kind, format);
}

}  // namespace engram
