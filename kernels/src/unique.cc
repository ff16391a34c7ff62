#include "unique.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <random>
#include <stdexcept>

namespace engram {
namespace {

constexpr std::int64_t kEmpty = -1;  // never stored: -1 is left out
constexpr std::size_t kMinSlots = 64;
constexpr std::size_t kFirstSlotsMax = 4096;  // 64 KiB: one decode step fits without growing
constexpr std::size_t kLookahead = 32;        // slots fetched before they are probed

std::uint64_t process_seed() {
  static const std::uint64_t seed = [] {
    std::random_device device;
    return std::uint64_t{device()} << 32 | device();
  }();
  return seed;
}

// Open addressing with linear probing, at most half full.
class Index {
 public:
  Index(std::size_t slots, std::vector<std::int64_t>& distinct)
      : slots_(slots), mask_(slots - 1), distinct_(distinct) {}

  // One 64 x 64 -> 128 multiplication, folded: both halves depend on every bit of the id.
  std::size_t hash(std::int64_t id) const {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(static_cast<std::uint64_t>(id) ^ seed_) *
        0x9E3779B97F4A7C15ull;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }

  void prefetch(std::size_t hash) const { __builtin_prefetch(&slots_[hash & mask_], 1); }

  std::int32_t find_or_add(std::int64_t id, std::size_t hash) {
    Slot* slot = find(id, hash);
    if (slot->id == id) return slot->index;
    if (2 * (distinct_.size() + 1) > slots_.size()) {
      grow();
      slot = find(id, hash);
    }
    *slot = {id, static_cast<std::int32_t>(distinct_.size())};
    distinct_.push_back(id);
    return slot->index;
  }

 private:
  struct Slot {
    std::int64_t id = kEmpty;
    std::int32_t index = 0;
  };

  Slot* find(std::int64_t id, std::size_t hash) {
    std::size_t at = hash & mask_;
    while (slots_[at].id != id && slots_[at].id != kEmpty) at = (at + 1) & mask_;
    return &slots_[at];
  }

  // By four: a bulk batch gets to its size in a few steps, and few ids are moved twice.
  void grow() {
    slots_.assign(slots_.size() * 4, Slot{});
    mask_ = slots_.size() - 1;
    for (std::size_t i = 0; i < distinct_.size(); ++i) {
      *find(distinct_[i], hash(distinct_[i])) = {distinct_[i], static_cast<std::int32_t>(i)};
    }
  }

  std::vector<Slot> slots_;
  std::size_t mask_;
  std::vector<std::int64_t>& distinct_;
  std::uint64_t seed_ = process_seed();
};

}  // namespace

void unique_ids(std::span<const std::int64_t> ids, std::vector<std::int64_t>& distinct,
                std::int32_t* inverse) {
  if (ids.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::length_error("unique_ids: more than 2^31 - 1 ids in one batch");
  }
  distinct.clear();
  Index index(std::clamp(std::bit_ceil(2 * ids.size()), kMinSlots, kFirstSlotsMax), distinct);

  std::size_t hashes[kLookahead];
  for (std::size_t first = 0; first < ids.size(); first += kLookahead) {
    const std::size_t count = std::min(kLookahead, ids.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      hashes[i] = index.hash(ids[first + i]);
      index.prefetch(hashes[i]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t id = ids[first + i];
      inverse[first + i] = id == kEmpty ? -1 : index.find_or_add(id, hashes[i]);
    }
  }
}

}  // namespace engram
