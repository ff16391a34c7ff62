// Packed rows in memory, by group: set-associative, with pins, and with one read for all who want
// the same rows at the same time.
//
// A batch looks a group up and pins its slot until its rows have been copied out. Rows that are not
// there become a Miss: those that nobody reads yet the miss reads itself, straight into the slot;
// for the others it waits for the miss that reads them. A row is in the cache only once its read
// has ended well.
//
// Each set has a lock, held for nanoseconds; pins are taken under it and given back without it.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "read_queue.h"
#include "row_group.h"
#include "wanted.h"

namespace engram {

class Batch;

// A group that a batch did not find whole. Aligned so that a read's tag can hold its address.
struct alignas(64) Miss {
  enum class State : std::uint8_t {
    queued,   // its reads have not begun, or not from the next copy
    started,  // they have
    taken,    // another miss, of a lane that goes first, makes them
  };

  Batch* batch = nullptr;
  const Wanted* wanted = nullptr;  // of the batch
  std::byte* data = nullptr;       // the group's rows: a cache slot, or memory of the batch
  std::uint32_t group = 0;         // number in the batch
  std::uint32_t entry = kNoEntry;
  Lane lane = Lane::decode;
  RowMask need = 0;    // rows the batch wants and did not find
  RowMask waits = 0;   // those of `need` that have neither arrived nor failed; guarded by the set
  RowMask reads = 0;   // rows it reads: fixed once started; before that guarded by the set
  bool ended = false;  // its reads have; guarded by the set
  RowMask apart = 0;   // rows of `reads` whose scales are a read of their own
  std::uint8_t copy = 0;   // of the table, that is read
  std::uint8_t tries = 0;  // copies that were read before it, for rows that could not be read there
  std::atomic<State> state{State::queued};
  std::atomic<std::uint8_t> reads_left{0};
  std::atomic<RowMask> failed{0};      // rows that could not be read, of `need` or `reads`
  std::atomic<std::int32_t> error{0};  // of one of them
  Miss* next = nullptr;                // of the same entry; afterwards, of those that are over

  static constexpr std::uint32_t kNoEntry = 0xFFFFFFFF;

  // Its reads may begin; false when another miss makes them.
  bool start() {
    State expected = State::queued;
    return state.compare_exchange_strong(expected, State::started, std::memory_order_acq_rel);
  }
  void fail(RowMask rows, std::int32_t why) {
    error.store(why, std::memory_order_relaxed);
    failed.fetch_or(rows, std::memory_order_relaxed);
  }
};

// Totals since start, in groups.
struct CacheCounters {
  std::atomic<std::uint64_t> hits{0};       // found whole
  std::atomic<std::uint64_t> misses{0};     // of which rows were read
  std::atomic<std::uint64_t> joined{0};     // all missing rows were being read already
  std::atomic<std::uint64_t> overflows{0};  // no slot: all that it might have were pinned
  std::atomic<std::uint64_t> used{0};       // slots taken, now
  std::atomic<std::uint64_t> evictions{0};
  std::atomic<std::uint64_t> ready_bytes{0};  // of capacity, made ready by populate()
};

class RowCache {
 public:
  // Takes `bytes` of address space; memory as slots are first used. row_bytes: of the longest
  // packed row. Throws std::bad_alloc.
  RowCache(std::uint64_t bytes, std::size_t row_bytes);
  ~RowCache();
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  // Fewer bytes hold no set: then there is no cache.
  static std::uint64_t bytes_min(std::size_t row_bytes);

  struct Found {
    std::uint32_t entry = Miss::kNoEntry;  // pinned; kNoEntry: no slot is free
    std::byte* data = nullptr;
    RowMask missing = 0;  // 0: a hit
    RowMask own = 0;      // of those, what the new miss reads; it waits for the others
  };
  // Hints for lookup(), some groups ahead of it: the set first, then the entry. Inlined always: a
  // function that does nothing but fetch ahead counts as one without effect, and calls of it are
  // dropped.
  [[gnu::always_inline]] void prefetch_set(std::uint64_t hash) const {
    __builtin_prefetch(&sets_[set_of(hash)], 1);
  }
  [[gnu::always_inline]] void prefetch_entry(std::uint64_t hash) const {
    const Set& set = sets_[set_of(hash)];
    const std::uint32_t ways = matches(set, tag_of(hash));
    // Of a group that is not there, the entry that makes room for it, as a rule.
    const std::size_t way = ways != 0 ? first(ways) : set.hand.load(std::memory_order_relaxed);
    __builtin_prefetch(&entries_[number(set, way)], 1);
  }
  // Finds or makes a group's entry and pins it. When rows are missing, `new_miss()` is called for
  // the Miss that shall stand for them; it is filled in and entered.
  template <typename NewMiss>
  Found lookup(const RowGroup& group, std::uint64_t hash, RowMask need, NewMiss new_miss) {
    Set& set = sets_[set_of(hash)];
    const std::lock_guard lock(set.mutex);
    const std::uint32_t at = find_or_make(set, group, hash);
    if (at == Miss::kNoEntry) return {.missing = need, .own = need};
    Entry& entry = entries_[at];
    const auto missing = static_cast<RowMask>(need & ~entry.valid);
    // May throw, so the pin comes after it.
    const RowMask own = missing == 0 ? RowMask{0} : enter(entry, at, new_miss(), missing);
    entry.pins.fetch_add(1, std::memory_order_relaxed);
    return {.entry = at, .data = data_of(at), .missing = missing, .own = own};
  }
  // Finds a group's rows and pins them, if all of `need` are there; data is null otherwise. The
  // caller copies them out at once and unpins.
  struct Hit {
    const std::byte* data = nullptr;
    std::uint32_t entry = Miss::kNoEntry;
    // The first time for this request, and rows of `need` that it had not found before; unless
    // another's came in between.
    bool first = false;
    RowMask fresh = 0;
  };
  Hit find(const RowGroup& group, std::uint64_t hash, RowMask need, std::uint64_t request) {
    Set& set = sets_[set_of(hash)];
    const std::lock_guard lock(set.mutex);
    for (std::uint32_t ways = matches(set, tag_of(hash)); ways != 0; ways &= ways - 1) {
      const std::uint32_t at = number(set, first(ways));
      Entry& entry = entries_[at];
      if (!(entry.group == group)) continue;
      if ((need & ~entry.valid) != 0) return {};
      const bool first_time = std::exchange(entry.request, request) != request;
      if (first_time) {
        entry.found = 0;
        warm(entry);
      }
      const auto fresh = static_cast<RowMask>(need & ~entry.found);
      entry.found |= need;
      entry.pins.fetch_add(1, std::memory_order_relaxed);
      return {.data = data_of(at), .entry = at, .first = first_time, .fresh = fresh};
    }
    return {};
  }
  [[gnu::always_inline]] void prefetch(std::uint32_t entry) const {
    __builtin_prefetch(&entries_[entry], 1);
  }
  void unpin(std::uint32_t entry) { entries_[entry].pins.fetch_sub(1, std::memory_order_release); }

  // The reads of a started miss have ended, well or as `failed` says. Returns the misses that are
  // over with it, linked by `next`; the caller tells their batches.
  Miss* ended(Miss& miss);
  // Whether a miss of a batch that is still wanted waits for the reads of this one.
  bool awaited(const Miss& miss) const;
  // Gives up a miss whose reads have not begun; but when it is awaited, and unless `regardless`,
  // returns false and leaves it. By the thread that would begin them. `over` as ended().
  bool give_up(Miss& miss, std::int32_t why, bool regardless, Miss*& over);

  // Makes all slots ready, unless `stop` turns true: the kernel clears memory when it is first
  // used, which takes longer than a read.
  void populate(const std::atomic<bool>& stop);
  // Whether enough is used that all of it will be.
  bool wants_memory() const {
    return counters_.used.load(std::memory_order_relaxed) > slots_ / kPopulateShare;
  }

  std::uint64_t capacity_bytes() const { return slots_ * slot_bytes_; }
  std::uint64_t slots() const { return slots_; }
  CacheCounters& counters() { return counters_; }

  // What the cache holds of a table now.
  struct Held {
    RowGroup group;
    RowMask valid;
    std::uint8_t heat;  // 0 .. kHeatMax
  };
  std::vector<Held> held(std::uint16_t table) const;

 private:
  static constexpr std::size_t kWays = 16;
  static constexpr std::uint32_t kAllWays = (1u << kWays) - 1;
  static constexpr std::uint8_t kHeatMax = 3;
  static constexpr std::uint64_t kNoRequest = 0;
  static constexpr std::uint64_t kPopulateShare = 32;

  // Tags are kept apart from entries, so that a lookup touches two cache lines.
  struct alignas(64) Set {
    std::mutex mutex;
    std::atomic<std::uint64_t> tags[2]{};  // 16 bytes, 0 = free; written under the mutex
    std::atomic<std::uint8_t> hand{0};     // likewise
  };
  static_assert(sizeof(Set) <= 128);

  struct alignas(64) Entry {
    RowGroup group;
    RowMask valid = 0;
    RowMask reading = 0;
    std::uint8_t heat = 0;  // of recent hits; the hand cools it
    RowMask found = 0;      // by `request`
    std::atomic<std::uint32_t> pins{0};
    std::uint64_t request = kNoRequest;  // the last that found it with find()
    Miss* misses = nullptr;              // that read or wait
  };
  static_assert(sizeof(Entry) == 64);

  std::size_t set_of(std::uint64_t hash) const {
    return static_cast<std::size_t>(static_cast<unsigned __int128>(hash) * set_count_ >> 64);
  }
  std::byte* data_of(std::uint32_t entry) const { return data_ + entry * slot_bytes_; }
  std::uint32_t number(const Set& set, std::size_t way) const {
    return static_cast<std::uint32_t>((&set - sets_) * static_cast<std::ptrdiff_t>(kWays)) +
           static_cast<std::uint32_t>(way);
  }
  // The set's number comes from the hash's high bits, so these are of its low ones.
  static std::uint8_t tag_of(std::uint64_t hash) {
    return std::max<std::uint8_t>(1, static_cast<std::uint8_t>(hash));
  }
  // Bit w is set when way w has the tag.
  static std::uint32_t matches(const Set& set, std::uint8_t tag) {
    constexpr std::uint64_t kLows = 0x7F7F7F7F7F7F7F7F;
    constexpr std::uint64_t kOnes = 0x0101010101010101;
    std::uint32_t ways = 0;
    for (unsigned half = 0; half < 2; ++half) {
      // Bytes that are equal become 0, then 0x80, all others 0; their high bits are then gathered.
      const std::uint64_t differs = set.tags[half].load(std::memory_order_relaxed) ^ (kOnes * tag);
      const std::uint64_t equal = ~(((differs & kLows) + kLows) | differs | kLows);
      ways |= static_cast<std::uint32_t>((equal * 0x0002040810204081) >> 56) << (8 * half);
    }
    return ways;
  }
  static std::size_t first(std::uint32_t ways) {
    return static_cast<std::size_t>(std::countr_zero(ways));
  }
  static void warm(Entry& entry) { entry.heat = std::min<std::uint8_t>(entry.heat + 1, kHeatMax); }
  static void set_tag(Set& set, std::size_t way, std::uint8_t tag);
  std::uint32_t find_or_make(Set& set, const RowGroup& group, std::uint64_t hash);
  std::uint32_t make(Set& set, const RowGroup& group, std::uint64_t hash);
  RowMask enter(Entry& entry, std::uint32_t at, Miss& miss, RowMask missing);
  Set& set_of_entry(std::uint32_t entry) const { return sets_[entry / kWays]; }
  bool awaited_in(const Entry& entry, const Miss& miss) const;
  static Miss* settle(Entry& entry, Miss& miss);

  std::size_t slot_bytes_;
  std::size_t set_count_;
  std::uint64_t slots_;
  std::byte* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  Set* sets_ = nullptr;
  Entry* entries_ = nullptr;
  std::byte* data_ = nullptr;
  CacheCounters counters_;
};

}  // namespace engram
