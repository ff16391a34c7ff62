// Distinct ids of a batch, in order of first appearance, with the way back.
#include "unique.h"

#include <doctest/doctest.h>

#include <array>
#include <limits>
#include <map>
#include <vector>

#include "support.h"

namespace engram::test {
namespace {

constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kHighest = std::numeric_limits<std::int64_t>::max();

struct Answer {
  std::vector<std::int64_t> distinct;
  std::vector<std::int32_t> inverse;
  bool operator==(const Answer&) const = default;
};

Answer answer(const std::vector<std::int64_t>& ids) {
  Answer answer{{99}, std::vector<std::int32_t>(ids.size(), 77)};
  unique_ids(ids, answer.distinct, answer.inverse.data());
  return answer;
}

Answer oracle(const std::vector<std::int64_t>& ids) {
  Answer answer;
  std::map<std::int64_t, std::int32_t> numbers;
  for (const std::int64_t id : ids) {
    if (id == -1) {
      answer.inverse.push_back(-1);
      continue;
    }
    const auto [entry, added] = numbers.emplace(id, static_cast<std::int32_t>(numbers.size()));
    if (added) answer.distinct.push_back(id);
    answer.inverse.push_back(entry->second);
  }
  return answer;
}

std::vector<std::int64_t> random_ids(std::uint64_t seed, std::size_t count, std::int64_t most) {
  Random random(seed);
  std::vector<std::int64_t> ids(count);
  for (std::int64_t& id : ids) id = draw<std::int64_t>(random, -1, most);
  return ids;
}

// Stands first: these threads are the process's first callers, and meet where the seed is drawn.
TEST_CASE("any number of threads at once") {
  constexpr unsigned kThreads = 4;
  std::array<Answer, kThreads> answers;
  const auto ids_of = [](unsigned thread) { return random_ids(thread, 20'000, 6'000); };
  in_parallel(kThreads, [&](unsigned thread) { answers[thread] = answer(ids_of(thread)); });
  for (unsigned thread = 0; thread < kThreads; ++thread) {
    CHECK(answers[thread] == oracle(ids_of(thread)));
  }
}

TEST_CASE("small batches and the ends of the number range") {
  const std::vector<std::int64_t> batches[] = {
      {}, {-1, -1}, {0, -1, 0}, {kLowest, kHighest, -2, kLowest, -1, kHighest}};
  for (const auto& ids : batches) CHECK(answer(ids) == oracle(ids));
}

TEST_CASE("every growth of the table keeps what was found") {
  for (const std::size_t count : {31, 32, 33, 64, 65, 2047, 2048, 2049, 2050, 8192, 8193, 40'000}) {
    CAPTURE(count);
    std::vector<std::int64_t> ids;
    for (std::size_t i = 0; i < count; ++i) ids.push_back(static_cast<std::int64_t>(i) * 7919);
    for (std::size_t i = count; i > 0; --i) ids.push_back(ids[i - 1]);
    CHECK(answer(ids) == oracle(ids));
  }
}

}  // namespace
}  // namespace engram::test
