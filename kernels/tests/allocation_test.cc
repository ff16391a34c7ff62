// An engine that runs out of memory in the middle of a submission: at every allocation in turn.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "engine.h"
#include "support.h"
#include "test_tables.h"

namespace {

// Allocations of this thread until one fails; negative: none does.
thread_local int allocations_left = -1;

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  void* memory = nullptr;
  if (::posix_memalign(&memory, std::max(alignment, sizeof(void*)), bytes) != 0) {
    throw std::bad_alloc();
  }
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace engram::test {
namespace {

std::shared_ptr<Batch> submit(Engine& engine, const std::vector<std::int64_t>& ids) {
  const LayerKeys keys{
      .layer = kTwoCopies, .ids = ids.data(), .position_stride = 8, .column_stride = 1};
  return engine.submit({keys}, {.positions = ids.size() / 8, .columns = {0, 8, kGroupRows}});
}

// The ids of `count` groups, from a row on; -1 in the last, whose rows are looked up singly.
std::vector<std::int64_t> groups_from(std::int64_t row, std::size_t count) {
  std::vector<std::int64_t> ids(8 * count);
  for (std::int64_t& id : ids) id = row++;
  ids.back() = -1;
  return ids;
}

void wait(Batch& batch) {
  while (!batch.wait(1000)) continue;
}

TEST_CASE("a submission without memory fails, and nobody waits for what it did not come to") {
  const TestTables tables(false);
  for (const std::uint64_t sets : {0, 1, 8}) {
    const auto reader = std::make_shared<Reader>(
        tables.paths(), ReaderOptions{.backend = "pread", .depth = 2, .threads = 2});
    Engine engine(reader, tables.tables(), 8 << 20, sets * RowCache::bytes_min(264));
    std::int64_t row = 0;
    int refused = 0;
    int failed = 0;
    for (int until = 0;; ++until) {
      const std::vector<std::int64_t> ids = groups_from(row, 20);
      row = (row + 7) % 2800;  // each shares rows and groups with what came before
      std::shared_ptr<Batch> batch;
      allocations_left = until;
      try {
        batch = submit(engine, ids);
      } catch (const std::bad_alloc&) {
        ++refused;
      }
      const bool done = allocations_left >= 0;  // with memory to spare
      allocations_left = -1;
      if (batch != nullptr) {
        wait(*batch);
        if (batch->failure()) {
          CHECK(batch->failure()->error == ENOMEM);
          ++failed;
        }
      }
      // The same groups, at once: nothing is left in the way of them.
      const auto after = submit(engine, ids);
      wait(*after);
      REQUIRE_FALSE(after->failure());
      std::vector<std::byte> rows(after->gathered_bytes(0, 1, Format::packed));
      after->gather(0, 1, Format::packed, rows.data());
      const auto expected =
          formula_row(kTwoCopies, static_cast<std::uint64_t>(ids.front()), RowKind::fp4);
      CHECK(std::equal(expected.begin(), expected.end(), rows.begin()));
      if (done) break;
    }
    CHECK(refused > 0);
    CHECK(failed > 0);
    engine.close();
  }
}

// Of the io thread that ends its one read, the second allocation from there on fails.
class Starving final : public ReadSource {
 public:
  std::size_t next(std::span<Read> out, Room& room) override {
    if (!room.take(0)) return 0;
    out[0] = {.offset = 0, .file = 0, .length = 1};
    asked_ = true;
    return 1;
  }
  bool exhausted() const override { return asked_; }
  void ended(const Read&, std::int32_t, const std::byte*) override { allocations_left = 1; }

 private:
  bool asked_ = false;
};

TEST_CASE("a row that no memory is left to ask the next copy for fails with its own error") {
  const TestTables tables(true);
  for (const std::uint64_t sets : {0, 4}) {
    const auto reader = std::make_shared<Reader>(
        tables.paths(), ReaderOptions{.backend = "pread", .depth = 2, .threads = 1});
    Engine engine(reader, tables.tables(), 8 << 20, sets * RowCache::bytes_min(264));
    const std::int64_t id = 3;  // broken in the first copy
    const LayerKeys keys{.layer = kMended, .ids = &id, .position_stride = 1, .column_stride = 1};
    Starving starving;
    reader->submit(starving, Lane::decode);
    for (const bool starved : {true, false}) {
      // The first allocation is the queue's, as a source leaves it.
      const auto batch = engine.submit({keys}, {.positions = 1, .columns = {0, 1, 1}});
      wait(*batch);
      CHECK(batch->failure().has_value() == starved);
      if (starved) CHECK(batch->failure()->error == kErrorChecksum);
    }
  }
}

}  // namespace
}  // namespace engram::test
