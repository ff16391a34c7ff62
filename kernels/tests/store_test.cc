// Packed stores: checksums, records, pages and FP8 -> FP4. Rows and pages have allocations of
// exactly their size, so that a sanitizer sees one byte too far.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "crc32c.h"
#include "pages.h"
#include "record.h"
#include "repack.h"
#include "support.h"

namespace engram::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr RowKind kKinds[] = {RowKind::fp4, RowKind::fp8};

StoreUuid some_uuid() {
  StoreUuid uuid;
  for (std::size_t i = 0; i < uuid.size(); ++i) uuid[i] = std::byte(i * 7);
  return uuid;
}

SourceRows in_planes(RowKind kind, const Bytes& codes, const Bytes& scales) {
  return {kind,       scales.size() / kScaleBytes, codes.data(), code_bytes(kind), scales.data(),
          kScaleBytes};
}

TEST_CASE("CRC-32C is the published one, by instruction and by table, at any alignment") {
  const char* const digits = "123456789";
  CHECK(crc32c(0, reinterpret_cast<const std::byte*>(digits), 9) == 0xE3069283);
  CHECK(crc32c_portable(0, reinterpret_cast<const std::byte*>(digits), 9) == 0xE3069283);
  Random random(1);
  for (std::size_t size = 0; size < 300; ++size) {
    const Bytes bytes = random_bytes(random, size);
    const std::size_t cut = draw(random, std::size_t{0}, size);
    const std::uint32_t whole = crc32c_portable(0, bytes.data(), size);
    const auto rest = std::make_unique<std::byte[]>(size - cut);
    std::ranges::copy(bytes.begin() + static_cast<std::ptrdiff_t>(cut), bytes.end(), rest.get());
    CHECK(crc32c(crc32c(0, bytes.data(), cut), rest.get(), size - cut) == whole);
    CHECK(crc32c_portable(crc32c(0, bytes.data(), cut), rest.get(), size - cut) == whole);
  }
}

TEST_CASE("a record matches as its own row of its own table only") {
  const RecordSeal seal(some_uuid(), 14), other_layer(some_uuid(), 1), other_store(StoreUuid{}, 14);
  Random random(2);
  for (const RowKind kind : kKinds) {
    const std::size_t row_bytes = packed_bytes(kind);
    Bytes record = random_bytes(random, row_bytes + kSealBytes);
    const std::uint32_t crc = seal.of(384'016'681, record.data(), row_bytes);
    std::memcpy(record.data() + row_bytes, &crc, sizeof(crc));
    CHECK(seal.matches(384'016'681, record.data(), row_bytes));
    CHECK_FALSE(seal.matches(384'016'680, record.data(), row_bytes));
    CHECK_FALSE(other_layer.matches(384'016'681, record.data(), row_bytes));
    CHECK_FALSE(other_store.matches(384'016'681, record.data(), row_bytes));
    for (std::byte& byte : record) {
      byte ^= std::byte{16};
      CHECK_FALSE(seal.matches(384'016'681, record.data(), row_bytes));
      byte ^= std::byte{16};
    }
  }
}

TEST_CASE("sealed pages are found sound, and stay inside their memory") {
  Random random(3);
  const RecordSeal seal(some_uuid(), 1);
  for (const RowKind kind : kKinds) {
    const RecordFormat format = RecordFormat::of(kind);
    for (std::size_t count = 1; count < 3 * format.records_per_page; count += 7) {
      const Bytes codes(count * code_bytes(kind), std::byte{0x11});
      const Bytes scales(count * kScaleBytes, std::byte{127});
      const std::uint64_t first = 5 * format.records_per_page;
      Bytes pages(format.pages_of(count) * kPageBytes, std::byte{0xAA});
      const PackReport report =
          seal_pages(in_planes(kind, codes, scales), first, kind, seal, first, pages.data());
      CHECK(report.suspects.empty());
      const PageFaults sound = check_pages(pages.data(), first, count, kind, seal);
      CHECK(sound.rows.empty());
      CHECK(sound.pages.empty());
      pages.back() ^= std::byte{1};
      const PageFaults faults = check_pages(pages.data(), first, count, kind, seal);
      CHECK(faults.pages == std::vector<std::uint64_t>{4 + format.pages_of(count)});
    }
  }
}

TEST_CASE("interleaved rows pack as planes do") {
  Random random(4);
  constexpr std::size_t kCount = 40, kRow = packed_bytes(RowKind::fp8);
  const Bytes rows = random_bytes(random, kCount * kRow);
  const SourceRows source = {
      RowKind::fp8, kCount, rows.data(), kRow, rows.data() + code_bytes(RowKind::fp8), kRow};
  Bytes out(rows.size());
  pack_rows(source, 0, RowKind::fp8, out.data());
  CHECK(out == rows);
}

TEST_CASE("re-quantising takes any bytes, and is within half a step of every value") {
  constexpr std::array<double, 8> kFp4 = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  Random random(5);
  for (int round = 0; round < 2000; ++round) {
    const Bytes codes = random_bytes(random, kRowValues),
                scales = random_bytes(random, kScaleBytes);
    Bytes packed(packed_bytes(RowKind::fp4));
    quantise_row(codes.data(), scales.data(), packed.data());
    // Where a block has the scale it came with, codes compare as they are.
    for (std::size_t block = 0; block < kScaleBytes; ++block) {
      const auto scale = packed[code_bytes(RowKind::fp4) + block];
      CHECK(scale != std::byte{255});
      if (scale != scales[block] || scale == std::byte{0}) continue;
      for (std::size_t i = block * kBlockValues; i < (block + 1) * kBlockValues; ++i) {
        const auto code = std::to_integer<unsigned>(codes[i]) & 0x7F;
        if (code == 0x7F) continue;
        const double value = code < 8 ? code / 512.0 : std::ldexp(8 + code % 8, int(code / 8) - 10);
        const auto pair = std::to_integer<unsigned>(packed[i / 2]);
        const double fp4 = kFp4[(i % 2 == 0 ? pair : pair >> 4) & 7];
        const double nearest = *std::ranges::min_element(
            kFp4, {}, [value](double candidate) { return std::abs(candidate - value); });
        CHECK(std::abs(fp4 - value) == std::abs(nearest - value));
      }
    }
  }
}

}  // namespace
}  // namespace engram::test
