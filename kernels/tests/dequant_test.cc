// Row conversions: every SIMD level gives the scalar twin's bits, and none reads or writes beyond a
// row. Rows and results have allocations of exactly their size, so that a sanitizer sees one byte
// too far.
#include "dequant.h"

#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "support.h"

namespace engram::test {
namespace {

using Row = std::vector<std::byte>;

constexpr RowKind kKinds[] = {RowKind::fp4, RowKind::fp8};
constexpr Format kFormats[] = {Format::packed, Format::packed_fp8, Format::bf16, Format::fp32};

// Row and result each end where their allocation does, and begin `misaligned` bytes into it.
Row converted(RowKind kind, Format format, Simd simd, const Row& row, std::size_t misaligned = 0) {
  const auto in = std::make_unique<std::byte[]>(misaligned + row.size());
  const auto out = std::make_unique<std::byte[]>(misaligned + output_bytes(kind, format));
  std::memcpy(in.get() + misaligned, row.data(), row.size());
  row_converter(kind, format, simd)(in.get() + misaligned, out.get() + misaligned);
  return Row(out.get() + misaligned, out.get() + misaligned + output_bytes(kind, format));
}

// A row whose codes go through all 256 bytes, from `first` on, under scale bytes that follow one
// another from `scale` on.
Row counting_row(RowKind kind, std::size_t first, std::size_t scale) {
  Row row;
  for (std::size_t i = 0; i < code_bytes(kind); ++i) row.push_back(std::byte(first + i));
  for (std::size_t i = 0; i < kScaleBytes; ++i) row.push_back(std::byte(scale + i));
  return row;
}

template <typename T>
std::vector<T> values_of(const Row& row) {
  std::vector<T> values(row.size() / sizeof(T));
  std::memcpy(values.data(), row.data(), row.size());
  return values;
}

TEST_CASE("every level gives the scalar bits for every code under every scale byte") {
  for (const RowKind kind : kKinds) {
    for (const Format format : kFormats) {
      CAPTURE(int(kind));
      CAPTURE(int(format));
      for (const Simd simd : supported_simd()) {
        std::size_t different = 0;
        // Eight scales a row and eight blocks a row: all pairs, once the codes have gone round too.
        for (std::size_t scale = 0; scale < 256; ++scale) {
          for (std::size_t first = 0; first < 256; first += 16) {
            const Row row = counting_row(kind, first, scale);
            different +=
                converted(kind, format, simd, row) != converted(kind, format, Simd::scalar, row);
          }
        }
        CHECK(different == 0);
      }
    }
  }
}

TEST_CASE("a row may lie at any address") {
  Random random(3);
  for (const RowKind kind : kKinds) {
    const Row row = random_bytes(random, packed_bytes(kind));
    for (const Format format : kFormats) {
      for (const Simd simd : supported_simd()) {
        const Row aligned = converted(kind, format, simd, row);
        for (std::size_t by = 1; by < 64; ++by) {
          CHECK(converted(kind, format, simd, row, by) == aligned);
        }
      }
    }
  }
}

TEST_CASE("a streaming converter writes what the ordinary one does") {
  std::size_t levels = 0;
  for (const RowKind kind : kKinds) {
    for (const Format format : kFormats) {
      for (const Simd simd : supported_simd()) {
        const ConvertRow stream = streaming_converter(kind, format, simd);
        const bool wide = format == Format::bf16 || format == Format::fp32;
        CHECK((stream != nullptr) == (wide && simd != Simd::scalar));
        if (stream == nullptr) continue;
        ++levels;
        std::size_t different = 0;
        const std::size_t bytes = output_bytes(kind, format);
        for (std::size_t scale = 0; scale < 256; ++scale) {
          for (std::size_t first = 0; first < 256; first += 16) {
            const Row row = counting_row(kind, first, scale);
            // Ends where the allocation does, at every multiple of 16 beside a cache line.
            const std::size_t at = first % 64;
            Row out(at + bytes, std::byte{0xA5});
            REQUIRE(reinterpret_cast<std::uintptr_t>(out.data()) % kStreamAlignment == 0);
            stream(row.data(), out.data() + at);
            Row expected(at, std::byte{0xA5});
            const Row scalar = converted(kind, format, Simd::scalar, row);
            expected.insert(expected.end(), scalar.begin(), scalar.end());
            different += out != expected;
          }
        }
        CHECK(different == 0);
      }
    }
  }
  CHECK(levels == 4 * (supported_simd().size() - 1));
}

TEST_CASE("values are those of the format's definition") {
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const Row row = counting_row(RowKind::fp4, 0, 124);
  for (const Simd simd : supported_simd()) {
    const auto values = values_of<float>(converted(RowKind::fp4, Format::fp32, simd, row));
    REQUIRE(values.size() == kRowValues);
    for (std::size_t i = 0; i < kRowValues; ++i) {
      const std::size_t code = i % 2 == 0 ? (i / 2) % 16 : i / 2 / 16;  // low nibble first
      const float sign = code < 8 ? 1.0f : -1.0f;
      const float scale = std::array{0.125f, 0.25f, 0.5f, 1.0f, 2.0f, 4.0f, 8.0f, 16.0f}[i / 32];
      CHECK(values[i] == sign * kMagnitudes[code % 8] * scale);
    }
  }
}

TEST_CASE("packed rows are copies") {
  Random random(5);
  for (const RowKind kind : kKinds) {
    const Row row = random_bytes(random, packed_bytes(kind));
    CHECK(converted(kind, Format::packed, supported_simd().front(), row) == row);
  }
}

}  // namespace
}  // namespace engram::test
