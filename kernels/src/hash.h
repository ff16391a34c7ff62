// Token ids -> row ids: the multiplicative-XOR hash of token n-grams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace engram {

// Hashes token sequences into the row ids of every Engram table.
//
// At position p of a sequence, id_j is the class of the token at p - j, for shifts j = 0 .. N - 1:
//
//     r = id_0 * m_0;  for j = 1 .. N - 1:  r ^= id_j * m_j;  for each head h:
//         column = (j - 1) * heads + h;  row = r mod prime[column] + offset[column]
//
// A shift that reaches before the sequence or onto an image token is blocked, and so is every older
// one: they use the pad class. At an image position all N ids are the pad class. An unknown id of
// the history (-1) is the pad class for that shift alone.
//
// Immutable after construction; rows() may be called from any number of threads.
class NgramHash {
 public:
  // token_map [V]: class of every token id. Row-major matrices: multipliers [layers, N]; primes and
  // offsets [layers, columns]. Throws std::invalid_argument when they do not describe tables for
  // which this hash is exact.
  NgramHash(std::span<const std::int32_t> token_map, std::int64_t pad_class,
            std::int64_t image_token_id, std::size_t layers,
            std::span<const std::uint64_t> multipliers, std::span<const std::uint64_t> primes,
            std::span<const std::uint64_t> offsets);

  std::size_t layers() const { return layers_; }
  // Per layer.
  std::size_t columns() const { return columns_.size() / layers_; }
  std::size_t max_ngram_size() const { return look_back_ + 1; }

  // Hashes sequences laid end to end: lengths[s] of `tokens` after history_lengths[s] of `history`.
  //
  // history  oldest first; fewer than N - 1 ids = the sequence starts there; -1 = unknown
  // rows     [tokens, layers, columns]
  // mask     [tokens]: true at image positions
  //
  // Throws std::invalid_argument naming sequence, position and id; the results are then undefined.
  void rows(std::span<const std::int32_t> tokens, std::span<const std::int64_t> lengths,
            std::span<const std::int32_t> history, std::span<const std::int64_t> history_lengths,
            std::int64_t* rows, bool* mask) const;

 private:
  struct Column {
    static Column of(std::uint64_t prime, std::uint64_t offset);
    // r mod prime + offset, exact for r < 2^63, without a division.
    std::uint64_t row(std::uint64_t r) const;

    std::uint64_t reciprocal;
    std::uint64_t prime;
    std::uint64_t offset;
    std::uint64_t shift;
  };

  bool is_token(std::int32_t id) const {
    return id >= 0 && static_cast<std::size_t>(id) < token_map_.size();
  }
  std::uint64_t class_of(std::int32_t id) const {
    return static_cast<std::uint64_t>(token_map_[static_cast<std::size_t>(id)]);
  }
  // Fills window[0 .. N - 2] with the classes before a sequence's first token.
  void load_history(std::size_t sequence, std::span<const std::int32_t> ids,
                    std::uint64_t* window) const;
  // now[-j] is the class at shift j; rows [layers, columns]. kHeads: heads_, or 0 = any number.
  template <std::size_t kHeads>
  void hash_position(const std::uint64_t* now, std::int64_t* rows) const;
  [[noreturn]] void refuse_token(std::size_t sequence, std::int64_t position,
                                 std::int32_t id) const;

  std::vector<std::int32_t> token_map_;
  std::uint64_t pad_class_;
  std::int32_t image_token_id_;
  std::size_t layers_;
  std::size_t look_back_ = 0;               // N - 1
  std::size_t heads_ = 0;                   // per order
  std::vector<std::uint64_t> multipliers_;  // [layers, N]
  std::vector<Column> columns_;             // [layers, columns]
};

}  // namespace engram
