// The n-gram hash: against the written rule, one position at a time, and from many threads at once.
#include "hash.h"

#include <doctest/doctest.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "support.h"

namespace engram::test {
namespace {

constexpr std::int32_t kPad = 2, kImage = 9, kUnknown = -1, kTokens = 10;

struct Model {
  std::size_t ngram, heads, layers;
  std::vector<std::int32_t> token_map{0, 1, 2, 3, 4, 1, 6, 5, 7, 8};
  std::vector<std::uint64_t> multipliers{};  // [layers, ngram]
  std::vector<std::uint64_t> primes{};       // [layers, columns]
  std::vector<std::uint64_t> offsets{};

  std::size_t columns() const { return (ngram - 1) * heads; }
  NgramHash hash() const {
    return NgramHash(token_map, kPad, kImage, layers, multipliers, primes, offsets);
  }
};

// Any modulus from 2 to 2^32 - 1 does for a prime; the smallest and the largest are always there.
Model model_of(std::size_t ngram, std::size_t heads, std::size_t layers) {
  Model model{.ngram = ngram, .heads = heads, .layers = layers};
  Random random(ngram * 100 + heads * 10 + layers);
  const std::uint64_t most = (std::uint64_t{1} << 63) / kTokens;
  for (std::size_t i = 0; i < layers * ngram; ++i) {
    model.multipliers.push_back(draw<std::uint64_t>(random, 1, most));
  }
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::uint64_t offset = 0;
    for (std::size_t column = 0; column < model.columns(); ++column) {
      const std::uint64_t modulus = column == 0   ? 2
                                    : column == 1 ? 0xFFFFFFFF
                                                  : draw<std::uint64_t>(random, 2, 0xFFFFFFFF);
      model.primes.push_back(modulus);
      model.offsets.push_back(offset);
      offset += modulus;
    }
  }
  return model;
}

struct Sequence {
  std::vector<std::int32_t> tokens, history;  // history: oldest first
};

struct Answer {
  std::vector<std::int64_t> rows;  // [tokens, layers, columns]
  std::vector<char> mask;
  bool operator==(const Answer&) const = default;
};

// Results are written into memory of exactly their size.
Answer answer(const NgramHash& hash, const std::vector<Sequence>& sequences) {
  std::vector<std::int32_t> tokens, history;
  std::vector<std::int64_t> lengths, history_lengths;
  for (const Sequence& sequence : sequences) {
    tokens.insert(tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
    history.insert(history.end(), sequence.history.begin(), sequence.history.end());
    lengths.push_back(static_cast<std::int64_t>(sequence.tokens.size()));
    history_lengths.push_back(static_cast<std::int64_t>(sequence.history.size()));
  }
  Answer answer;
  answer.rows.resize(tokens.size() * hash.layers() * hash.columns());
  const auto mask = std::make_unique<bool[]>(tokens.size());
  hash.rows(tokens, lengths, history, history_lengths, answer.rows.data(), mask.get());
  answer.mask.assign(mask.get(), mask.get() + tokens.size());
  return answer;
}

// Classes at shifts 0 .. N - 1 of ids[position]; ids[0] is the oldest that is known.
std::vector<std::uint64_t> classes_at(const Model& model, const std::vector<std::int32_t>& ids,
                                      std::size_t position) {
  std::vector<std::uint64_t> classes;
  bool blocked = false;
  for (std::size_t shift = 0; shift < model.ngram; ++shift) {
    blocked = blocked || shift > position || ids[position - shift] == kImage;
    const bool pad = blocked || ids[position - shift] == kUnknown;
    const std::int32_t token = pad ? 0 : ids[position - shift];
    classes.push_back(static_cast<std::uint64_t>(pad ? kPad : model.token_map[token]));
  }
  return classes;
}

Answer oracle(const Model& model, const std::vector<Sequence>& sequences) {
  Answer answer;
  for (const auto& [tokens, history] : sequences) {
    std::vector<std::int32_t> ids = history;
    ids.insert(ids.end(), tokens.begin(), tokens.end());
    for (std::size_t at = history.size(); at < ids.size(); ++at) {
      const auto classes = classes_at(model, ids, at);
      answer.mask.push_back(ids[at] == kImage);
      for (std::size_t i = 0; i < model.primes.size(); ++i) {
        const std::size_t layer = i / model.columns();
        const std::size_t order = i % model.columns() / model.heads + 2;
        std::uint64_t mixed = 0;
        for (std::size_t shift = 0; shift < order; ++shift) {
          mixed ^= classes[shift] * model.multipliers[layer * model.ngram + shift];
        }
        answer.rows.push_back(
            static_cast<std::int64_t>(mixed % model.primes[i] + model.offsets[i]));
      }
    }
  }
  return answer;
}

std::vector<Sequence> random_sequences(const Model& model, std::uint64_t seed,
                                       std::vector<std::size_t> lengths) {
  Random random(seed);
  std::vector<Sequence> sequences;
  for (const std::size_t length : lengths) {
    Sequence& sequence = sequences.emplace_back();
    sequence.tokens.resize(length);
    sequence.history.resize(draw<std::size_t>(random, 0, model.ngram - 1));
    for (auto& id : sequence.tokens) id = draw<std::int32_t>(random, 0, kTokens - 1);
    for (auto& id : sequence.history) id = draw<std::int32_t>(random, kUnknown, kTokens - 1);
  }
  return sequences;
}

TEST_CASE("sequences of any length equal the rule, in every shape of table") {
  for (const Model& model : {model_of(4, 8, 2), model_of(2, 1, 1), model_of(6, 9, 3)}) {
    CAPTURE(model.ngram);
    const NgramHash hash = model.hash();
    const auto sequences =
        random_sequences(model, model.ngram, {0, 1, 2, 3, 63, 64, 65, 0, 127, 128, 129, 700});
    CHECK(answer(hash, sequences) == oracle(model, sequences));
    CHECK(answer(hash, {}).rows.empty());
  }
}

TEST_CASE("a bad id is refused wherever it stands") {
  const Model model = model_of(4, 8, 2);
  const NgramHash hash = model.hash();
  std::vector<std::int32_t> late(130, 0);
  late.back() = kTokens;
  const Sequence bad[] = {{{3, kTokens}, {}}, {{kUnknown}, {}},      {late, {}},
                          {{3}, {4, -2}},     {{}, {kTokens, 4, 4}}, {{3}, {1, 1, 1, 1}}};
  for (const Sequence& sequence : bad) {
    CHECK_THROWS_AS(answer(hash, {{{3}, {}}, sequence}), std::invalid_argument);
  }
}

TEST_CASE("lengths that do not add up are refused") {
  const NgramHash hash = model_of(4, 8, 2).hash();
  const std::vector<std::int32_t> tokens{1, 2, 3};
  std::vector<std::int64_t> rows(tokens.size() * hash.layers() * hash.columns());
  bool mask[3];
  const auto call = [&](std::vector<std::int64_t> lengths, std::vector<std::int64_t> histories) {
    hash.rows(tokens, lengths, {}, histories, rows.data(), mask);
  };
  CHECK_NOTHROW(call({2, 1}, {0, 0}));
  CHECK_THROWS_AS(call({2}, {0}), std::invalid_argument);
  CHECK_THROWS_AS(call({4}, {0}), std::invalid_argument);
  CHECK_THROWS_AS(call({-1, 4}, {0, 0}), std::invalid_argument);
  CHECK_THROWS_AS(call({3}, {1}), std::invalid_argument);
  CHECK_THROWS_AS(call({3}, {0, 0}), std::invalid_argument);
}

TEST_CASE("one hash serves any number of threads") {
  constexpr unsigned kThreads = 4;
  const Model model = model_of(4, 8, 2);
  const NgramHash hash = model.hash();
  const auto sequences_of = [&](unsigned thread) {
    return random_sequences(model, thread, {300, 1, 65, 200});
  };
  std::vector<Answer> answers(kThreads);
  in_parallel(kThreads,
              [&](unsigned thread) { answers[thread] = answer(hash, sequences_of(thread)); });
  for (unsigned thread = 0; thread < kThreads; ++thread) {
    CHECK(answers[thread] == oracle(model, sequences_of(thread)));
  }
}

}  // namespace
}  // namespace engram::test
