#include "hash.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

namespace engram {
namespace {

constexpr std::int32_t kUnknown = -1;
constexpr std::uint64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
constexpr std::uint64_t kPrimeMax = std::numeric_limits<std::uint32_t>::max();

// Tokens compressed ahead of their hashing: the lookups of a block overlap, instead of each waiting
// behind the arithmetic of the position before it.
constexpr std::size_t kBlockTokens = 64;

// V4.1's count. Known to the compiler it unrolls the innermost loop: a quarter faster.
constexpr std::size_t kUnrolledHeads = 8;

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

std::string range(std::uint64_t low, std::uint64_t high) {
  return std::to_string(low) + ".." + std::to_string(high);
}

// Cuts one sequence after another off an array of ids.
class Slices {
 public:
  Slices(const char* name, std::span<const std::int32_t> ids) : name_(name), rest_(ids) {}

  std::span<const std::int32_t> take(std::size_t sequence, std::int64_t length) {
    if (length < 0 || static_cast<std::uint64_t>(length) > rest_.size()) {
      refuse("sequence " + std::to_string(sequence) + ": the " + name_ + " length is " +
             std::to_string(length) + ", but " + std::to_string(rest_.size()) + " ids are left");
    }
    const auto taken = rest_.first(static_cast<std::size_t>(length));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

  void finish() const {
    if (!rest_.empty()) {
      refuse(std::string("the ") + name_ + " lengths leave " + std::to_string(rest_.size()) +
             " ids over; they must sum to the number of ids");
    }
  }

 private:
  const char* name_;
  std::span<const std::int32_t> rest_;
};

void check_token_map(std::span<const std::int32_t> token_map, std::int64_t pad_class,
                     std::int64_t image_token_id) {
  if (token_map.empty() || token_map.size() > std::numeric_limits<std::int32_t>::max()) {
    refuse("the token map has " + std::to_string(token_map.size()) +
           " ids; expected 1 to 2^31 - 1");
  }
  const auto [low, high] = std::ranges::minmax(token_map);
  if (low < 0) refuse("the token map holds the negative class " + std::to_string(low));
  if (pad_class < 0 || pad_class > high) {
    refuse("pad class " + std::to_string(pad_class) + " is not in " + range(0, high));
  }
  if (image_token_id < 0 || static_cast<std::uint64_t>(image_token_id) >= token_map.size()) {
    refuse("image token id " + std::to_string(image_token_id) + " is not in " +
           range(0, token_map.size() - 1));
  }
}

// With every product below 2^63 the XOR of products is too, which Column::row needs.
void check_multipliers(std::span<const std::uint64_t> multipliers, std::int32_t highest_class) {
  const std::uint64_t most = kInt64Max / static_cast<std::uint64_t>(std::max(highest_class, 1));
  for (const std::uint64_t factor : multipliers) {
    if (factor > most) {
      refuse("multiplier " + std::to_string(factor) + " times class " +
             std::to_string(highest_class) + " exceeds 2^63 - 1");
    }
  }
}

}  // namespace

NgramHash::NgramHash(std::span<const std::int32_t> token_map, std::int64_t pad_class,
                     std::int64_t image_token_id, std::size_t layers,
                     std::span<const std::uint64_t> multipliers,
                     std::span<const std::uint64_t> primes, std::span<const std::uint64_t> offsets)
    : token_map_(token_map.begin(), token_map.end()),
      pad_class_(static_cast<std::uint64_t>(pad_class)),
      image_token_id_(static_cast<std::int32_t>(image_token_id)),
      layers_(layers),
      multipliers_(multipliers.begin(), multipliers.end()) {
  check_token_map(token_map, pad_class, image_token_id);
  check_multipliers(multipliers, std::ranges::max(token_map));
  const std::size_t ngram = layers == 0 ? 0 : multipliers.size() / layers;
  if (ngram < 2 || ngram * layers != multipliers.size()) {
    refuse("multipliers must be [layers, N], with at least one layer and N at least 2");
  }
  look_back_ = ngram - 1;
  const std::size_t columns = primes.size() / layers;
  heads_ = columns / look_back_;
  if (heads_ == 0 || layers * look_back_ * heads_ != primes.size() ||
      offsets.size() != primes.size()) {
    refuse("primes and offsets must be [layers, (N - 1) * heads], with at least one head");
  }
  columns_.reserve(primes.size());
  for (std::size_t i = 0; i < primes.size(); ++i) {
    const std::uint64_t expected = i % columns == 0 ? 0 : offsets[i - 1] + primes[i - 1];
    if (primes[i] < 2 || primes[i] > kPrimeMax) {
      refuse("prime " + std::to_string(primes[i]) + " is not in " + range(2, kPrimeMax));
    }
    if (offsets[i] != expected) {
      refuse("the offset of column " + std::to_string(i % columns) + " is " +
             std::to_string(offsets[i]) + ", but the primes before it sum to " +
             std::to_string(expected));
    }
    columns_.push_back(Column::of(primes[i], offsets[i]));
  }
}

// The round-up reciprocal of Granlund and Montgomery, "Division by Invariant Integers using
// Multiplication" (1994), for numerators of 63 bits. Take s with 2^s < p <= 2^(s + 1) and
// m = ceil(2^(64 + s) / p). Then m fits in 64 bits, m * p = 2^(64 + s) + e with e < p <= 2^(s + 1),
//
//     r * m / 2^(64 + s)  =  r / p  +  (r * e / 2^(64 + s)) / p
//
// and for r < 2^63 the last term is below 1 / p: it cannot lift r / p to the next integer, so the
// floor of the left side is the quotient, with nothing to correct.
NgramHash::Column NgramHash::Column::of(std::uint64_t prime, std::uint64_t offset) {
  const auto shift = static_cast<std::uint64_t>(std::bit_width(prime - 1) - 1);
  const unsigned __int128 power = static_cast<unsigned __int128>(1) << (64 + shift);
  return {static_cast<std::uint64_t>((power + prime - 1) / prime), prime, offset, shift};
}

std::uint64_t NgramHash::Column::row(std::uint64_t r) const {
  const unsigned __int128 product = static_cast<unsigned __int128>(r) * reciprocal;
  return r - (static_cast<std::uint64_t>(product >> 64) >> shift) * prime + offset;
}

// A window holds the classes of look_back_ earlier positions and of one block, oldest first. What
// is blocked is overwritten with the pad class, together with all that is older, as soon as the
// image token is reached: so later positions see it without looking for it.
void NgramHash::rows(std::span<const std::int32_t> tokens, std::span<const std::int64_t> lengths,
                     std::span<const std::int32_t> history,
                     std::span<const std::int64_t> history_lengths, std::int64_t* rows,
                     bool* mask) const {
  if (lengths.size() != history_lengths.size()) {
    refuse(std::to_string(lengths.size()) + " lengths, but " +
           std::to_string(history_lengths.size()) +
           " history lengths; each sequence has one of each");
  }
  Slices token_slices("token", tokens);
  Slices history_slices("history", history);
  std::vector<std::uint64_t> window(look_back_ + kBlockTokens);
  std::uint64_t* const now = window.data() + look_back_;
  for (std::size_t sequence = 0; sequence < lengths.size(); ++sequence) {
    load_history(sequence, history_slices.take(sequence, history_lengths[sequence]), window.data());
    const auto ids = token_slices.take(sequence, lengths[sequence]);
    for (std::size_t first = 0; first < ids.size(); first += kBlockTokens) {
      const auto block = ids.subspan(first, std::min(kBlockTokens, ids.size() - first));
      for (std::size_t i = 0; i < block.size(); ++i) {
        if (!is_token(block[i]))
          refuse_token(sequence, static_cast<std::int64_t>(first + i), block[i]);
        now[i] = class_of(block[i]);
        mask[i] = block[i] == image_token_id_;
      }
      for (std::size_t i = 0; i < block.size(); ++i) {
        if (mask[i]) std::fill(now + i - look_back_, now + i + 1, pad_class_);
        if (heads_ == kUnrolledHeads) {
          hash_position<kUnrolledHeads>(now + i, rows);
        } else {
          hash_position<0>(now + i, rows);
        }
        rows += columns_.size();
      }
      mask += block.size();
      std::copy_n(window.data() + block.size(), look_back_, window.data());
    }
  }
  token_slices.finish();
  history_slices.finish();
}

void NgramHash::load_history(std::size_t sequence, std::span<const std::int32_t> ids,
                             std::uint64_t* window) const {
  if (ids.size() > look_back_) {
    refuse("sequence " + std::to_string(sequence) + ": " + std::to_string(ids.size()) +
           " history ids; at most " + std::to_string(look_back_) + " are looked back at");
  }
  std::fill_n(window, look_back_, pad_class_);
  std::uint64_t* slot = window + look_back_ - ids.size();
  for (std::size_t i = 0; i < ids.size(); ++i, ++slot) {
    if (ids[i] == kUnknown) continue;
    if (!is_token(ids[i])) {
      refuse_token(sequence, static_cast<std::int64_t>(i) - static_cast<std::int64_t>(ids.size()),
                   ids[i]);
    }
    if (ids[i] == image_token_id_) {
      std::fill(window, slot, pad_class_);
    } else {
      *slot = class_of(ids[i]);
    }
  }
}

template <std::size_t kHeads>
void NgramHash::hash_position(const std::uint64_t* now, std::int64_t* rows) const {
  const std::size_t heads = kHeads == 0 ? heads_ : kHeads;
  const std::uint64_t* factor = multipliers_.data();
  const Column* column = columns_.data();
  for (std::size_t layer = 0; layer < layers_; ++layer) {
    std::uint64_t r = *now * *factor++;
    for (std::size_t shift = 1; shift <= look_back_; ++shift) {
      r ^= *(now - shift) * *factor++;
      for (std::size_t head = 0; head < heads; ++head) {
        rows[head] = static_cast<std::int64_t>(column[head].row(r));
      }
      column += heads;
      rows += heads;
    }
  }
}

void NgramHash::refuse_token(std::size_t sequence, std::int64_t position, std::int32_t id) const {
  refuse("sequence " + std::to_string(sequence) + ", position " + std::to_string(position) +
         (position < 0 ? " (history)" : "") + ": token id " + std::to_string(id) + " is not in " +
         range(0, token_map_.size() - 1) + (position < 0 ? ", nor -1 for unknown" : ""));
}

}  // namespace engram
