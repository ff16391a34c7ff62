#include "row_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <random>
#include <utility>

namespace engram {
namespace {

constexpr std::size_t kLineBytes = 64;
// Memory made ready at a time: a few milliseconds.
constexpr std::size_t kPopulateBytes = 32 << 20;

constexpr std::size_t round_up(std::size_t bytes) {
  return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

}  // namespace

GroupHash::GroupHash() {
  std::random_device device;
  for (std::uint64_t& seed : seeds_) seed = std::uint64_t{device()} << 32 | device();
}

std::uint64_t RowCache::bytes_min(std::size_t row_bytes) {
  return sizeof(Set) + kWays * (sizeof(Entry) + round_up(kGroupRows * row_bytes));
}

RowCache::RowCache(std::uint64_t bytes, std::size_t row_bytes)
    : slot_bytes_(round_up(kGroupRows * row_bytes)),
      // A slot's number must fit 32 bits, and one of them says "none".
      set_count_(std::min<std::uint64_t>(bytes / bytes_min(row_bytes), Miss::kNoEntry / kWays)),
      slots_(set_count_ * kWays) {
  memory_bytes_ = set_count_ * bytes_min(row_bytes);
  void* const memory = ::mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory, memory_bytes_, MADV_HUGEPAGE);
  memory_ = static_cast<std::byte*>(memory);
  // Slots first: they want the alignment of huge pages most.
  data_ = memory_;
  entries_ = reinterpret_cast<Entry*>(data_ + slots_ * slot_bytes_);
  sets_ = reinterpret_cast<Set*>(reinterpret_cast<std::byte*>(entries_) + slots_ * sizeof(Entry));
  for (std::size_t i = 0; i < set_count_; ++i) new (&sets_[i]) Set;
}

RowCache::~RowCache() {
  std::destroy_n(sets_, set_count_);
  ::munmap(memory_, memory_bytes_);
}

void RowCache::set_tag(Set& set, std::size_t way, std::uint8_t tag) {
  std::atomic<std::uint64_t>& half = set.tags[way / 8];
  const unsigned shift = 8 * (way % 8);
  const std::uint64_t others =
      half.load(std::memory_order_relaxed) & ~(std::uint64_t{0xFF} << shift);
  half.store(others | std::uint64_t{tag} << shift, std::memory_order_relaxed);
}

std::uint32_t RowCache::find_or_make(Set& set, const RowGroup& group, std::uint64_t hash) {
  for (std::uint32_t ways = matches(set, tag_of(hash)); ways != 0; ways &= ways - 1) {
    const std::uint32_t at = number(set, first(ways));
    Entry& entry = entries_[at];
    if (entry.group == group) {
      warm(entry);
      return at;
    }
  }
  return make(set, group, hash);
}

// A free way, or else the first unpinned one that the hand finds cold. New groups start cold: what
// is asked for once does not push out what is asked for often.
std::uint32_t RowCache::make(Set& set, const RowGroup& group, std::uint64_t hash) {
  std::size_t way = kWays;
  if (const std::uint32_t free = matches(set, 0); free != 0) {
    // From anywhere on: were the first ways taken first, the rows of a cache that is not full would
    // lie at the same few distances from each other, and memory answers those more slowly.
    const auto from = static_cast<unsigned>(hash >> 8) % kWays;
    way = (first((free >> from | free << (kWays - from)) & kAllWays) + from) % kWays;
    new (&entries_[number(set, way)]) Entry;
    counters_.used.fetch_add(1, std::memory_order_relaxed);
  } else {
    std::uint8_t hand = set.hand.load(std::memory_order_relaxed);
    for (std::size_t steps = kWays * (kHeatMax + 1); steps > 0 && way == kWays; --steps) {
      Entry& entry = entries_[number(set, hand)];
      if (entry.pins.load(std::memory_order_acquire) == 0 && entry.heat-- == 0) way = hand;
      hand = static_cast<std::uint8_t>((hand + 1) % kWays);
    }
    set.hand.store(hand, std::memory_order_relaxed);
    if (way == kWays) return Miss::kNoEntry;
    counters_.evictions.fetch_add(1, std::memory_order_relaxed);
  }
  Entry& entry = entries_[number(set, way)];
  entry.group = group;
  entry.valid = 0;
  entry.heat = 0;
  entry.request = kNoRequest;
  set_tag(set, way, tag_of(hash));
  return number(set, way);
}

// Returns the rows that the miss reads itself: those nobody reads, and those whose reads wait in a
// lane that goes after its own.
RowMask RowCache::enter(Entry& entry, std::uint32_t at, Miss& miss, RowMask missing) {
  auto own = static_cast<RowMask>(missing & ~entry.reading);
  for (Miss* other = entry.misses; other != nullptr; other = other->next) {
    if ((other->reads & missing) == 0 || other->ended || miss.lane >= other->lane) continue;
    Miss::State expected = Miss::State::queued;
    if (!other->state.compare_exchange_strong(expected, Miss::State::taken,
                                              std::memory_order_acq_rel)) {
      continue;
    }
    own |= std::exchange(other->reads, RowMask{0});
    other->ended = true;
  }
  miss.data = data_of(at);
  miss.entry = at;
  miss.need = missing;
  miss.waits = missing;
  miss.reads = own;
  miss.ended = own == 0;
  miss.next = std::exchange(entry.misses, &miss);
  entry.reading |= own;
  return own;
}

Miss* RowCache::ended(Miss& miss) {
  const std::lock_guard lock(set_of_entry(miss.entry).mutex);
  return settle(entries_[miss.entry], miss);
}

bool RowCache::awaited(const Miss& miss) const {
  const std::lock_guard lock(set_of_entry(miss.entry).mutex);
  return awaited_in(entries_[miss.entry], miss);
}

bool RowCache::awaited_in(const Entry& entry, const Miss& miss) const {
  for (const Miss* other = entry.misses; other != nullptr; other = other->next) {
    if (other != &miss && (other->waits & miss.reads) != 0 && other->wanted->why_not() == 0) {
      return true;
    }
  }
  return false;
}

bool RowCache::give_up(Miss& miss, std::int32_t why, bool regardless, Miss*& over) {
  over = nullptr;
  const std::lock_guard lock(set_of_entry(miss.entry).mutex);
  if (miss.state.load(std::memory_order_acquire) != Miss::State::queued || miss.ended) return true;
  Entry& entry = entries_[miss.entry];
  if (!regardless && awaited_in(entry, miss)) return false;
  miss.state.store(Miss::State::started, std::memory_order_release);
  miss.fail(miss.reads, why);
  over = settle(entry, miss);
  return true;
}

// Makes known how the reads of a miss ended, and takes off the entry what is over with it.
Miss* RowCache::settle(Entry& entry, Miss& miss) {
  const RowMask failed = miss.failed.load(std::memory_order_acquire) & miss.reads;
  entry.valid |= static_cast<RowMask>(miss.reads & ~failed);
  entry.reading &= static_cast<RowMask>(~miss.reads);
  miss.ended = true;
  Miss* over = nullptr;
  for (Miss** link = &entry.misses; *link != nullptr;) {
    Miss& other = **link;
    if (const RowMask bad = other.waits & failed; bad != 0 && &other != &miss) {
      // Who has given up itself knows why.
      const std::int32_t own = other.wanted->why_not();
      other.fail(bad, own != 0 ? own : miss.error.load(std::memory_order_relaxed));
    }
    other.waits &= static_cast<RowMask>(~miss.reads);
    if (other.waits == 0 && other.ended) {
      *link = other.next;
      other.next = std::exchange(over, &other);
    } else {
      link = &other.next;
    }
  }
  return over;
}

void RowCache::populate(const std::atomic<bool>& stop) {
#ifdef MADV_POPULATE_WRITE
  for (std::size_t at = 0; at < memory_bytes_ && !stop.load(std::memory_order_relaxed);
       at += kPopulateBytes) {
    const std::size_t bytes = std::min(kPopulateBytes, memory_bytes_ - at);
    // Kernels before 5.14 do not know it: then slots are made ready one by one, as they are used.
    if (::madvise(memory_ + at, bytes, MADV_POPULATE_WRITE) != 0) return;
    counters_.ready_bytes.store(std::min(at + bytes, capacity_bytes()), std::memory_order_relaxed);
  }
#endif
}

std::vector<RowCache::Held> RowCache::held(std::uint16_t table) const {
  std::vector<Held> found;
  for (std::size_t i = 0; i < set_count_; ++i) {
    const std::lock_guard lock(sets_[i].mutex);
    const std::uint32_t taken = ~matches(sets_[i], 0) & kAllWays;
    for (std::uint32_t ways = taken; ways != 0; ways &= ways - 1) {
      const Entry& entry = entries_[number(sets_[i], first(ways))];
      if (entry.valid == 0 || entry.group.table != table) continue;
      found.push_back({.group = entry.group, .valid = entry.valid, .heat = entry.heat});
    }
  }
  return found;
}

}  // namespace engram
