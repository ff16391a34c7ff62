// One read on its way through short results, interruptions and refusals: the kernel's side is
// played here, byte for byte.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "files.h"
#include "read.h"
#include "support.h"

namespace engram::test {
namespace {

using Next = ReadProgress::Next;

constexpr std::size_t kSize = 30'011;  // ends inside a sector

struct Table {
  explicit Table(std::uint64_t seed) : random(seed), content(random_bytes(random, kSize)) {}

  TemporaryDirectory directory;
  Random random;
  std::vector<std::byte> content;
  DataFile file{directory.write("table.bin", content)};
};

// Answers one ask like a file that ends at `file_bytes`, with at most `most` bytes.
std::int64_t play_read(const Table& table, const ReadProgress& progress, std::byte* slot,
                       std::size_t file_bytes, std::size_t most) {
  const std::uint64_t at = progress.ask_offset();
  const std::size_t left = at < file_bytes ? file_bytes - at : 0;
  const std::size_t count = std::min({left, most, std::size_t{progress.ask_bytes()}});
  std::memcpy(slot + progress.buffer_offset(), table.content.data() + at, count);
  return static_cast<std::int64_t>(count);
}

// What every ask must keep to, whatever came before.
bool is_proper(const ReadProgress& progress, const DataFile& file) {
  return progress.ask_bytes() > 0 && progress.ask_offset() % file.alignment() == 0 &&
         progress.ask_bytes() % file.alignment() == 0 &&
         progress.buffer_offset() + progress.ask_bytes() <= kSlotBytes;
}

Read random_read(Random& random) {
  const auto length = draw<std::uint16_t>(random, 1, kReadBytesMax);
  return {.offset = draw<std::uint64_t>(random, 0, kSize - length), .length = length};
}

TEST_CASE("short results and interruptions end in the file's bytes") {
  Table table(1);
  const auto slot = std::make_unique<std::byte[]>(kSlotBytes);
  for (int round = 0; round < 2000; ++round) {
    const Read read = random_read(table.random);
    ReadProgress progress;
    progress.start(read, table.file);
    unsigned interruptions = 0;
    Next next = Next::again;
    while (next == Next::again) {
      REQUIRE(is_proper(progress, table.file));
      const auto dice = draw<int>(table.random, 0, 5);
      if (dice == 0 && interruptions < kRetriesMax) {
        ++interruptions;
        next = progress.advance(round % 2 == 0 ? -EINTR : -EAGAIN, table.file);
        continue;
      }
      // At least what was asked for again plus one byte: progress, however slow.
      const std::size_t alignment = table.file.alignment();
      const auto most = draw<std::size_t>(table.random, alignment, alignment + 700);
      next = progress.advance(play_read(table, progress, slot.get(), kSize, most), table.file);
    }
    REQUIRE(next == Next::done);
    CHECK(progress.error() == 0);
    CHECK(progress.retries() == interruptions);
    CHECK(std::memcmp(slot.get() + progress.head(), table.content.data() + read.offset,
                      read.length) == 0);
  }
}

TEST_CASE("a file that ends inside the wanted bytes is truncated, and one that ends after is not") {
  Table table(2);
  const auto slot = std::make_unique<std::byte[]>(kSlotBytes);
  for (int round = 0; round < 2000; ++round) {
    const Read read = random_read(table.random);
    const std::uint64_t end = read.offset + read.length;
    const auto file_bytes = draw<std::size_t>(table.random, read.offset, end + 10);
    ReadProgress progress;
    progress.start(read, table.file);
    Next next = Next::again;
    while (next == Next::again) {
      next = progress.advance(
          play_read(table, progress, slot.get(), std::min(file_bytes, kSize), kSlotBytes),
          table.file);
    }
    CHECK((next == Next::done) == (file_bytes >= end));
    CHECK(progress.error() == (file_bytes >= end ? 0 : kErrorTruncated));
  }
}

TEST_CASE("an error of the disk ends the read with that error") {
  Table table(3);
  ReadProgress progress;
  progress.start(random_read(table.random), table.file);
  CHECK(progress.advance(-EIO, table.file) == Next::failed);
  CHECK(progress.error() == EIO);
}

TEST_CASE("interruptions without end are given up on") {
  Table table(4);
  ReadProgress progress;
  progress.start(random_read(table.random), table.file);
  for (int i = 0; i < kRetriesMax; ++i)
    REQUIRE(progress.advance(-EINTR, table.file) == Next::again);
  CHECK(progress.advance(-EINTR, table.file) == Next::failed);
  CHECK(progress.error() == EINTR);
}

TEST_CASE("a refused alignment is raised once, and the read begun again") {
  Table table(5);
  const auto slot = std::make_unique<std::byte[]>(kSlotBytes);
  const Read read = random_read(table.random);
  ReadProgress progress;
  progress.start(read, table.file);
  if (table.file.direct() && table.file.alignment() < kFallbackAlignment) {
    REQUIRE(progress.advance(-EINVAL, table.file) == Next::again);
    CHECK(table.file.alignment() == kFallbackAlignment);
    REQUIRE(is_proper(progress, table.file));
    CHECK(progress.advance(play_read(table, progress, slot.get(), kSize, kSlotBytes), table.file) ==
          Next::done);
    CHECK(std::memcmp(slot.get() + progress.head(), table.content.data() + read.offset,
                      read.length) == 0);
    progress = {};
    progress.start(read, table.file);
  }
  CHECK(progress.advance(-EINVAL, table.file) == Next::failed);
  CHECK(progress.error() == EINVAL);
}

}  // namespace
}  // namespace engram::test
