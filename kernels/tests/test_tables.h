// Small tables of every layout, whose rows follow from a formula that no product code knows.
#pragma once

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "record.h"
#include "support.h"
#include "table.h"

namespace engram::test {

inline std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

// The packed row of a table, byte for byte.
inline std::vector<std::byte> formula_row(std::int64_t layer, std::uint64_t row, RowKind kind) {
  std::vector<std::byte> bytes(kind == RowKind::fp4 ? 136 : 264);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(layer) << 48 | row << 16 | (i / 8);
    bytes[i] = static_cast<std::byte>(mixed(at) >> 8 * (i % 8));
  }
  return bytes;
}

// Layers of the tables below, and what is wrong with them.
inline constexpr std::int64_t kTwoCopies = 1;    // FP4 in place, twice
inline constexpr std::int64_t kInterleaved = 2;  // FP8 in place, codes and scales in one record
inline constexpr std::int64_t kPacked = 3;       // FP4 in pages; some seals are broken
inline constexpr std::int64_t kTruncated = 4;    // FP4 in place; the file has lost its end
inline constexpr std::int64_t kMended = 5;       // FP4, three copies, each with faults of its own
inline constexpr std::size_t kTestLayers = 5;

class TestTables {
 public:
  static constexpr std::uint64_t kRows = 3001;
  static constexpr std::uint64_t kBrokenEvery = 1000;  // rows 3, 1003, 2003, ...
  static constexpr std::uint64_t kLost = 2;            // rows at the end
  static constexpr StoreUuid kUuid{std::byte{7}, std::byte{1}};

  explicit TestTables(bool with_faults) : with_faults_(with_faults) {
    // Files 0 to 7; planes at odd offsets.
    paths_.push_back(directory_.write("copy0", planes(kTwoCopies, 1001)));
    paths_.push_back(directory_.write("copy1", planes(kTwoCopies, 77)));
    paths_.push_back(directory_.write("interleaved", records(kInterleaved, 4096)));
    paths_.push_back(directory_.write("packed", pages(kPacked)));
    paths_.push_back(directory_.write("truncated", planes(kTruncated, 5)));
    paths_.push_back(directory_.write("mended0", pages(kMended, 0)));
    paths_.push_back(directory_.write("mended1", planes(kMended, 9)));
    paths_.push_back(directory_.write("mended2", pages(kMended, 1)));
    tables_ = {
        {.layer = kTwoCopies, .rows = kRows, .copies = {in_place(0, 1001), in_place(1, 77)}},
        {.layer = kInterleaved,
         .rows = kRows,
         .kind = RowKind::fp8,
         .copies = {{.planes = {.codes = {.file = 2, .offset = 4096, .stride = 264},
                                .scales = {.file = 2, .offset = 4096 + 256, .stride = 264}}}}},
        {.layer = kPacked,
         .rows = kRows,
         .copies = {{.pages = Pages{.file = 3, .offset = 4096, .uuid = kUuid}}}},
        {.layer = kTruncated, .rows = kRows, .copies = {in_place(4, 5)}},
        {.layer = kMended,
         .rows = kRows,
         .copies = {{.pages = Pages{.file = 5, .offset = 4096, .uuid = kUuid}},
                    in_place(6, 9),
                    {.pages = Pages{.file = 7, .offset = 4096, .uuid = kUuid}}}},
    };
  }

  const std::vector<std::string>& paths() const { return paths_; }
  const std::vector<Table>& tables() const { return tables_; }
  static RowKind kind_of(std::int64_t layer) {
    return layer == kInterleaved ? RowKind::fp8 : RowKind::fp4;
  }

  // To be called once the files are open.
  void truncate() const {
    if (!with_faults_) return;
    for (const std::string& path : {paths_[4], paths_[6]}) {
      std::filesystem::resize_file(path, std::filesystem::file_size(path) - 8 * kLost);
    }
  }
  // Why a row cannot be read from any copy; 0: it can.
  std::int32_t error_of(std::int64_t layer, std::uint64_t row) const {
    if (!with_faults_) return 0;
    if (layer == kPacked && row % kBrokenEvery == 3) return -2;
    if (layer == kTruncated && row >= kRows - kLost) return -1;
    return 0;
  }

 private:
  static TableCopy in_place(std::uint32_t file, std::uint64_t offset) {
    return {.planes = {.codes = {.file = file, .offset = offset, .stride = 128},
                       .scales = {.file = file, .offset = offset + 128 * kRows, .stride = 8}}};
  }
  static std::vector<std::byte> planes(std::int64_t layer, std::size_t offset) {
    std::vector<std::byte> file(offset + 136 * kRows);
    for (std::uint64_t row = 0; row < kRows; ++row) {
      const std::vector<std::byte> bytes = formula_row(layer, row, RowKind::fp4);
      std::memcpy(&file[offset + 128 * row], bytes.data(), 128);
      std::memcpy(&file[offset + 128 * kRows + 8 * row], bytes.data() + 128, 8);
    }
    return file;
  }
  static std::vector<std::byte> records(std::int64_t layer, std::size_t offset) {
    std::vector<std::byte> file(offset);
    for (std::uint64_t row = 0; row < kRows; ++row) {
      const std::vector<std::byte> bytes = formula_row(layer, row, RowKind::fp8);
      file.insert(file.end(), bytes.begin(), bytes.end());
    }
    return file;
  }
  bool broken(std::int64_t layer, std::uint64_t row, std::uint64_t third) const {
    if (layer == kMended) return with_faults_ && row % 3 == third;
    return error_of(layer, row) != 0;
  }
  // third: of the rows of kMended, which are broken.
  std::vector<std::byte> pages(std::int64_t layer, std::uint64_t third = 0) const {
    const RecordSeal seal(kUuid, static_cast<std::uint32_t>(layer));
    std::vector<std::byte> file(4096 * (1 + (kRows + 28) / 29));
    for (std::uint64_t row = 0; row < kRows; ++row) {
      const std::vector<std::byte> bytes = formula_row(layer, row, RowKind::fp4);
      std::byte* const record = &file[4096 + row / 29 * 4096 + row % 29 * 140];
      std::memcpy(record, bytes.data(), 136);
      const std::uint32_t sum = seal.of(row, bytes.data(), 136);
      std::memcpy(record + 136, &sum, 4);
      if (broken(layer, row, third)) record[row % 136] ^= std::byte{16};
    }
    return file;
  }

  bool with_faults_;
  TemporaryDirectory directory_;
  std::vector<std::string> paths_;
  std::vector<Table> tables_;
};

}  // namespace engram::test
