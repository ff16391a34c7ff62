// The row cache alone: who reads, who waits, what is kept and what is pushed out. Reads are played
// here; a slot is known by its number.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <new>
#include <vector>

#include "row_cache.h"
#include "support.h"

namespace engram::test {
namespace {

constexpr std::size_t kRowBytes = 136;
constexpr std::size_t kWays = 16;

RowGroup group_of(std::uint32_t first) {
  RowGroup group;
  for (std::uint32_t r = 0; r < kGroupRows; ++r) group.ids[r] = first + r;
  return group;
}

// A cache, the misses made in it, and the rows that a lookup left to its caller.
struct Cache {
  explicit Cache(std::size_t sets = 1) : rows(sets * RowCache::bytes_min(kRowBytes), kRowBytes) {}

  struct Looked {
    RowCache::Found found;
    Miss* miss = nullptr;  // null: a hit, or no slot
  };
  Looked look(std::uint32_t first, RowMask need, Lane lane = Lane::decode) {
    Looked looked;
    const RowGroup group = group_of(first);
    looked.found = rows.lookup(group, hash(group), need, [&]() -> Miss& {
      looked.miss = &misses.emplace_back();
      looked.miss->lane = lane;
      looked.miss->wanted = &wanted;
      return *looked.miss;
    });
    return looked;
  }
  // Begins a miss's reads and ends them; the misses that are over.
  std::vector<Miss*> read(Miss& miss, RowMask failed = 0, std::int32_t why = EIO) {
    REQUIRE(miss.start());
    if (failed != 0) miss.fail(failed, why);
    return listed(rows.ended(miss));
  }
  static std::vector<Miss*> listed(Miss* over) {
    std::vector<Miss*> list;
    for (; over != nullptr; over = over->next) list.push_back(over);
    return list;
  }
  // Looks a group up, reads all of it and lets go.
  void fill(std::uint32_t first) {
    const Looked looked = look(first, 0xFF);
    if (looked.miss != nullptr) read(*looked.miss);
    rows.unpin(looked.found.entry);
  }

  RowCache rows;
  GroupHash hash;
  std::deque<Miss> misses;
  Wanted wanted;  // by whom they are all made
};

using Misses = std::vector<Miss*>;

TEST_CASE("rows are found once they have been read, and only those") {
  Cache cache;
  const auto first = cache.look(0, 0x0F);
  CHECK(first.found.missing == 0x0F);
  CHECK(first.found.own == 0x0F);
  CHECK(cache.read(*first.miss) == Misses{first.miss});
  CHECK(cache.look(0, 0x0F).found.missing == 0);
  const auto more = cache.look(0, 0x3C);
  CHECK(more.found.missing == 0x30);
  CHECK(more.found.own == 0x30);
  CHECK(more.found.data == first.found.data);
}

TEST_CASE("a row that could not be read is not kept, and fails those who wait for it") {
  Cache cache;
  const auto reads = cache.look(0, 0x0F);
  const auto waits = cache.look(0, 0x03);
  const auto other = cache.look(0, 0x0C);
  CHECK(waits.found.own == 0);
  CHECK(cache.read(*reads.miss, 0x01).size() == 3);
  CHECK(waits.miss->failed.load() == 0x01);
  CHECK(waits.miss->error.load() == EIO);
  CHECK(other.miss->failed.load() == 0);
  const auto again = cache.look(0, 0x0F);
  CHECK(again.found.own == 0x01);
}

TEST_CASE("who needs rows of several reads is over with the last of them") {
  Cache cache;
  const auto low = cache.look(0, 0x0F);
  const auto high = cache.look(0, 0xF0);
  const auto all = cache.look(0, 0xFF);
  CHECK(all.found.missing == 0xFF);
  CHECK(all.found.own == 0);
  CHECK(cache.read(*high.miss) == Misses{high.miss});
  const Misses over = cache.read(*low.miss);
  CHECK(over.size() == 2);
  CHECK(std::ranges::count(over, all.miss) == 1);
}

TEST_CASE("who reads some rows itself and waits for others is over when both have ended") {
  for (const bool own_first : {true, false}) {
    Cache cache;
    const auto low = cache.look(0, 0x0F);
    const auto both = cache.look(0, 0x3C);
    CHECK(both.found.own == 0x30);
    Miss& first = own_first ? *both.miss : *low.miss;
    Miss& second = own_first ? *low.miss : *both.miss;
    CHECK(cache.read(first).size() == (own_first ? 0 : 1));
    CHECK(cache.read(second).size() == (own_first ? 2 : 1));
  }
}

TEST_CASE("a lane that goes first takes over reads that have not begun; no other does") {
  Cache cache;
  const auto bulk = cache.look(0, 0xFF, Lane::prefill);
  CHECK(cache.look(0, 0x01, Lane::prefill).found.own == 0);
  CHECK(cache.look(0, 0x01, Lane::prefetch).found.own == 0);
  // All of the miss, since its batch will not read the rest.
  const auto decode = cache.look(0, 0x01, Lane::decode);
  CHECK(decode.found.own == 0xFF);
  CHECK_FALSE(bulk.miss->start());
  CHECK(cache.read(*decode.miss).size() == 4);

  Cache begun;
  const auto started = begun.look(0, 0xFF, Lane::prefill);
  REQUIRE(started.miss->start());
  CHECK(begun.look(0, 0x01, Lane::decode).found.own == 0);
}

TEST_CASE("rows taken over fail for those whose they were, too") {
  Cache cache;
  const auto bulk = cache.look(0, 0xF0, Lane::prefetch);
  const auto decode = cache.look(0, 0x18, Lane::decode);
  CHECK(decode.found.own == 0xF8);
  CHECK(cache.read(*decode.miss, 0x80).size() == 2);
  CHECK(bulk.miss->failed.load() == 0x80);
  CHECK((decode.miss->failed.load() & decode.miss->need) == 0);
}

TEST_CASE("what is pinned stays; without a slot the caller is on its own") {
  Cache cache;
  std::vector<std::uint32_t> entries;
  for (std::uint32_t g = 0; g < kWays; ++g) {
    const auto looked = cache.look(100 * g, 0xFF);
    cache.read(*looked.miss);
    entries.push_back(looked.found.entry);
  }
  const auto none = cache.look(9000, 0x0F);
  CHECK(none.found.entry == Miss::kNoEntry);
  CHECK(none.found.own == 0x0F);
  CHECK(none.miss == nullptr);
  cache.rows.unpin(entries[5]);
  const auto taken = cache.look(9000, 0x0F);
  CHECK(taken.found.entry == entries[5]);
  CHECK(taken.found.own == 0x0F);  // nothing of the group that was there before
  CHECK(cache.look(9100, 0xFF).found.entry == Miss::kNoEntry);
  CHECK(cache.rows.counters().evictions.load() == 1);
}

TEST_CASE("what is asked for once does not push out what is asked for often") {
  Cache cache;
  for (int i = 0; i < 4; ++i) {
    for (std::uint32_t g = 0; g < 4; ++g) cache.fill(100 * g);
  }
  for (std::uint32_t g = 10; g < 30; ++g) cache.fill(100 * g);
  for (std::uint32_t g = 0; g < 4; ++g) CHECK(cache.look(100 * g, 0xFF).found.missing == 0);
}

TEST_CASE("a request is told which groups, and which of their rows, it has not found before") {
  Cache cache;
  const auto find = [&](std::uint32_t first, RowMask need, std::uint64_t request) {
    const RowGroup group = group_of(first);
    const RowCache::Hit hit = cache.rows.find(group, cache.hash(group), need, request);
    REQUIRE(hit.data != nullptr);
    cache.rows.unpin(hit.entry);
    return hit;
  };
  cache.fill(0);
  CHECK(find(0, 0x0F, 1).first);
  CHECK_FALSE(find(0, 0x3C, 1).first);
  CHECK(find(0, 0x3C, 1).fresh == 0);
  CHECK(find(0, 0xF0, 1).fresh == 0xC0);
  CHECK(find(0, 0x3C, 2).first);
  CHECK(find(0, 0xF0, 2).fresh == 0xC0);
  // Another group, in the slot that this request has found the first one in.
  for (std::uint32_t g = 1; g <= 5 * kWays; ++g) {
    cache.fill(100 * g);
    CHECK(find(100 * g, 0xFF, 2).first);
    CHECK(find(100 * g, 0xFF, 2).fresh == 0);
  }
  CHECK(cache.rows.counters().evictions.load() > kWays);
}

TEST_CASE("a miss is given up unless others wait for it, and then only regardless of them") {
  Cache cache;
  const auto reads = cache.look(0, 0x0F);
  Miss* over = nullptr;
  {
    const auto apart = cache.look(0, 0xF0);  // waits for nothing of it
    CHECK(cache.rows.give_up(*apart.miss, ECANCELED, false, over));
    CHECK(Cache::listed(over) == Misses{apart.miss});
    CHECK(apart.miss->error.load() == ECANCELED);
  }
  const auto waits = cache.look(0, 0x08);
  CHECK(cache.rows.awaited(*reads.miss));
  CHECK_FALSE(cache.rows.awaited(*waits.miss));
  CHECK_FALSE(cache.rows.give_up(*reads.miss, ECANCELED, false, over));
  CHECK(over == nullptr);
  CHECK(cache.rows.give_up(*reads.miss, ETIMEDOUT, true, over));
  CHECK(Cache::listed(over).size() == 2);
  CHECK(waits.miss->failed.load() == 0x08);
  CHECK(waits.miss->error.load() == ETIMEDOUT);
  // What was given up is free to be read by the next.
  CHECK(cache.look(0, 0xFF).found.own == 0xFF);
}

TEST_CASE("those who have given up themselves do not keep a miss from being given up") {
  Cache cache;
  Wanted impatient;
  const auto reads = cache.look(0, 0xFF);
  const auto waits = cache.look(0, 0xFF);
  waits.miss->wanted = &impatient;
  CHECK(cache.rows.awaited(*reads.miss));
  impatient.drop();
  CHECK_FALSE(cache.rows.awaited(*reads.miss));
  Miss* over = nullptr;
  CHECK(cache.rows.give_up(*reads.miss, ECANCELED, false, over));
  CHECK(Cache::listed(over).size() == 2);
}

TEST_CASE("reads that have begun, or that others have taken over, are not given up") {
  Cache cache;
  Miss* over = nullptr;
  const auto begun = cache.look(0, 0xFF);
  REQUIRE(begun.miss->start());
  CHECK(cache.rows.give_up(*begun.miss, ECANCELED, true, over));
  CHECK(over == nullptr);
  CHECK(begun.miss->failed.load() == 0);
  const auto bulk = cache.look(100, 0xFF, Lane::prefill);
  cache.look(100, 0xFF, Lane::decode);
  CHECK(cache.rows.give_up(*bulk.miss, ECANCELED, true, over));
  CHECK(over == nullptr);
  CHECK(bulk.miss->failed.load() == 0);
}

TEST_CASE("a lookup that cannot make its miss leaves no trace") {
  Cache cache;
  const RowGroup group = group_of(0);
  const auto fail = [&] {
    cache.rows.lookup(group, cache.hash(group), 0xFF, []() -> Miss& { throw std::bad_alloc(); });
  };
  CHECK_THROWS_AS(fail(), std::bad_alloc);
  // Not pinned: as many others as there are ways find a slot.
  for (std::uint32_t g = 1; g <= kWays; ++g) {
    CHECK(cache.look(100 * g, 1).found.entry != Miss::kNoEntry);
  }
}

TEST_CASE("of a read's beginning, a take-over and giving up, one happens") {
  for (int round = 0; round < 300; ++round) {
    Cache cache;
    const auto bulk = cache.look(0, 0xFF, Lane::prefill);
    Miss decode_miss;
    decode_miss.wanted = &cache.wanted;
    std::atomic<int> reading{0};
    std::atomic<int> over_count{0};
    const auto count = [&](Miss* over) {
      over_count += static_cast<int>(Cache::listed(over).size());
    };
    const RowGroup group = group_of(0);
    const std::uint64_t hash = cache.hash(group);
    in_parallel(3, [&](unsigned number) {
      if (number == 0 && bulk.miss->start()) {
        ++reading;
        count(cache.rows.ended(*bulk.miss));
      } else if (number == 1) {
        const auto found =
            cache.rows.lookup(group, hash, 0xFF, [&]() -> Miss& { return decode_miss; });
        if (found.own == 0) return;
        reading += decode_miss.start() ? 1 : 10;
        count(cache.rows.ended(decode_miss));
      } else if (number == 2) {
        Miss* over = nullptr;
        cache.rows.give_up(*bulk.miss, ECANCELED, true, over);
        count(over);
      }
    });
    // Whether by itself, by another or not at all, each miss is over once.
    CHECK(over_count.load() == (decode_miss.entry == Miss::kNoEntry ? 1 : 2));
    CHECK(reading.load() <= 2);
    const bool given_up = bulk.miss->failed.load() != 0;
    CHECK((given_up || cache.look(0, 0xFF).found.missing == 0));
  }
}

}  // namespace
}  // namespace engram::test
