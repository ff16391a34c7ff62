// Who is let in, on a clock of the test's own.
#include "admission.h"

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace engram::test {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kMs = 1'000'000;

struct World {
  std::shared_ptr<Admissions> all = std::make_shared<Admissions>();
  AdmissionLimits limits{};
  std::int64_t now = kSecond;

  std::shared_ptr<Admission> admit(std::uint64_t rows, Lane lane = Lane::prefill,
                                   std::optional<double> left_s = std::nullopt,
                                   std::shared_ptr<Quota> client = nullptr) {
    return all->admit(rows, lane, limits, left_s, std::move(client), now);
  }
  std::optional<Overloaded> refusal(std::uint64_t rows, Lane lane = Lane::prefill,
                                    std::optional<double> left_s = std::nullopt,
                                    std::shared_ptr<Quota> client = nullptr) {
    try {
      admit(rows, lane, left_s, std::move(client));
      return std::nullopt;
    } catch (const Overloaded& error) {
      return error;
    }
  }
  // Reads what was planned, at so many rows a second.
  void read(Admission& admission, std::uint64_t rows, double rows_per_s) {
    constexpr std::uint64_t kStep = 10;
    for (std::uint64_t done = 0; done < rows; done += kStep) {
      now += std::llround(kStep / rows_per_s * kSecond);
      admission.read(std::min(kStep, rows - done), true);
    }
    admission.all_read(now);
  }
  // Makes it known that a drive reads so many rows a second.
  void learn(double rows_per_s, Lane lane = Lane::prefill) {
    const auto rows = static_cast<std::uint64_t>(rows_per_s * 10);
    const auto admission = admit(rows, lane);
    admission->planned(rows, rows, now);
    read(*admission, rows, rows_per_s);
    admission->release();
  }
};

TEST_CASE("whoever has nobody before him is let in, however much he asks for") {
  World world;
  world.learn(1'000);
  const auto huge = world.admit(30'000'000, Lane::prefill, 0.001);
  CHECK(world.all->rows() == 30'000'000);
  huge->release();
  huge->release();
  CHECK(world.all->rows() == 0);
}

TEST_CASE("a queue is as long as it takes to read it") {
  World world;
  world.learn(1'000);
  std::vector<std::shared_ptr<Admission>> held;
  for (int i = 0; i < 5; ++i) {
    held.push_back(world.admit(250));
    held.back()->planned(250, 250, world.now);
  }
  // 1.25 s are before it, a quarter too much.
  const auto refused = world.refusal(250);
  REQUIRE(refused);
  CHECK(refused->limit == OverloadLimit::queue);
  CHECK(refused->retry_after_s == doctest::Approx(0.25).epsilon(0.01));
  CHECK(std::string(refused->what()).starts_with("the request would wait about 1.2"));
  world.limits.queue_s = 1.5;
  CHECK(!world.refusal(250));
  world.limits.queue_s = 1.0;
  // As it is read, there is room again.
  world.read(*held.front(), 250, 1'000);
  CHECK(!world.refusal(250));
  CHECK(world.all->wait_s(Lane::prefill, world.now) == doctest::Approx(1.0).epsilon(0.02));
  CHECK(world.all->wait_s(Lane::decode, world.now) == 0.0);
}

TEST_CASE("a huge request holds up a small one by its turns only") {
  World world;
  world.learn(1'000);
  const auto huge = world.admit(1'000'000);
  huge->planned(1'000'000, 1'000'000, world.now);
  const auto small = world.admit(900);
  small->planned(900, 900, world.now);
  CHECK(world.refusal(900));  // 900 of each
  CHECK(!world.refusal(450));
}

TEST_CASE("decode is not held up by bulk, nor are the bulk lanes told apart") {
  World world;
  world.learn(1'000);
  world.learn(1'000, Lane::decode);
  const auto bulk = world.admit(100'000);
  bulk->planned(100'000, 100'000, world.now);
  CHECK(world.refusal(2'000, Lane::prefetch));
  const auto decode = world.admit(2'000, Lane::decode, 0.5);
  decode->planned(2'000, 2'000, world.now);
  CHECK(world.refusal(2'000, Lane::decode)->limit == OverloadLimit::queue);
}

TEST_CASE("what cannot be answered in its time is refused at once") {
  World world;
  world.learn(1'000);
  const auto first = world.admit(500);
  first->planned(500, 500, world.now);
  const auto refused = world.refusal(300, Lane::prefill, 0.5);  // 0.3 s to wait, and 0.3 of its own
  REQUIRE(refused);
  CHECK(refused->limit == OverloadLimit::deadline);
  CHECK(refused->retry_after_s == doctest::Approx(0.1).epsilon(0.05));
  CHECK(!world.refusal(300, Lane::prefill, 0.65));
}

TEST_CASE("what the cache has makes no queue, and no rate") {
  World world;
  world.learn(1'000);
  for (int i = 0; i < 100; ++i) {
    const auto hit = world.admit(10'000);
    hit->planned(10'000, 0, world.now);
    hit->release();
  }
  // Neither while it waits to be planned, now that nothing had to be read for so long.
  std::vector<std::shared_ptr<Admission>> held;
  for (int i = 0; i < 100; ++i) held.push_back(world.admit(10'000));
  held.clear();
  // But a drive is not faster for it.
  const auto cold = world.admit(2'000);
  cold->planned(2'000, 2'000, world.now);
  CHECK(world.refusal(2'000)->limit == OverloadLimit::queue);
}

TEST_CASE("a client that does not take its rows holds nobody up") {
  World world;
  world.learn(1'000);
  const auto stalled = world.admit(1'000'000);
  stalled->planned(10'000, 10'000, world.now);
  CHECK(world.refusal(5'000));
  world.read(*stalled, 10'000, 1'000);
  world.now += 3'600 * kSecond;
  CHECK(!world.refusal(5'000));
  // Nor was the drive slow meanwhile.
  stalled->planned(100'000, 100'000, world.now);
  CHECK(!world.refusal(900));
  CHECK(world.refusal(1'100));
}

TEST_CASE("a drive that stalls is noticed, and forgiven") {
  World world;
  world.learn(1'000);
  const auto first = world.admit(500);
  first->planned(500, 500, world.now);
  CHECK(!world.refusal(500));
  world.now += kSecond;
  CHECK(world.refusal(500)->limit == OverloadLimit::queue);
  world.now += 600 * kSecond;
  CHECK(world.refusal(500)->retry_after_s <= 5.0);
  world.read(*first, 500, 1'000);
  first->release();
  const auto second = world.admit(500);
  second->planned(500, 500, world.now);
  world.read(*second, 500, 1'000);
  const auto third = world.admit(500);
  third->planned(500, 500, world.now);
  CHECK(!world.refusal(500));
}

TEST_CASE("reads that were given up are no reads") {
  World world;
  world.learn(1'000);
  for (int i = 0; i < 100; ++i) {
    const auto given_up = world.admit(10'000);
    given_up->planned(10'000, 10'000, world.now);
    given_up->release();
    given_up->read(10'000, false);
    given_up->all_read(world.now);
  }
  const auto cold = world.admit(2'000);
  cold->planned(2'000, 2'000, world.now);
  CHECK(world.refusal(2'000)->limit == OverloadLimit::queue);
}

TEST_CASE("before anything was read a good drive is assumed, and a bad one found out in seconds") {
  World world;
  std::vector<std::shared_ptr<Admission>> held;
  for (int i = 0; i < 10; ++i) held.push_back(world.admit(100'000));
  for (const auto& admission : held) admission->planned(100'000, 100'000, world.now);
  CHECK(!world.refusal(100'000));
  for (int i = 0; i < 40; ++i) {
    world.now += 100 * kMs;
    held[0]->read(100, true);
  }
  CHECK(world.refusal(1'000));
}

TEST_CASE("rows of all requests have a limit, of which an eighth is for decode") {
  World world;
  world.limits.rows = 25;
  const auto first = world.admit(20, Lane::decode);
  CHECK(std::string(world.refusal(6, Lane::decode)->what()) ==
        "20 rows are being worked on; 6 more would pass the limit of 25");
  CHECK(
      std::string(world.refusal(4)->what()) ==
      "20 rows are being worked on; 4 more would pass the limit of 22 for lanes other than decode");
  CHECK(world.refusal(4)->limit == OverloadLimit::rows);
  CHECK(!world.refusal(5, Lane::decode));
}

TEST_CASE("rows of one client have a limit, which no other client feels") {
  World world;
  world.limits.client_rows = 100;
  const auto greedy = std::make_shared<Quota>();
  const auto other = std::make_shared<Quota>();
  auto first = world.admit(150, Lane::decode, std::nullopt, greedy);  // it has no other
  const auto refused = world.refusal(1, Lane::decode, std::nullopt, greedy);
  REQUIRE(refused);
  CHECK(refused->limit == OverloadLimit::client_rows);
  CHECK(
      std::string(refused->what()).starts_with("the client has 150 rows being worked on; 1 more"));
  CHECK(!world.refusal(100, Lane::decode, std::nullopt, other));
  first.reset();
  CHECK(!world.refusal(100, Lane::decode, std::nullopt, greedy));
}

TEST_CASE("a client's rate is kept over time, and a pause is worth a second of it") {
  World world;
  world.limits.client_rows_per_s = 1'000;
  const auto client = std::make_shared<Quota>();
  const auto asked = [&](std::uint64_t rows) {
    return world.refusal(rows, Lane::decode, std::nullopt, client);
  };
  world.now += 3'600 * kSecond;
  CHECK(!asked(600));
  CHECK(!asked(900));  // 500 more than it had
  const auto refused = asked(1);
  REQUIRE(refused);
  CHECK(refused->limit == OverloadLimit::client_rate);
  CHECK(refused->retry_after_s == doctest::Approx(0.5));
  world.now += kSecond / 2;
  CHECK(asked(1));
  world.now += kMs;
  CHECK(!asked(1));
  // A request that is worth minutes is let in, and paid for afterwards.
  world.now += 10 * kSecond;
  CHECK(!asked(61'000));
  world.now += 59 * kSecond;
  CHECK(asked(1));
  world.now += 2 * kSecond;
  CHECK(!asked(1));
  // A request that was refused for another reason costs nothing.
  world.now += 10 * kSecond;
  world.limits.rows = 10;
  CHECK(asked(500)->limit == OverloadLimit::rows);
  world.limits.rows = 10'000;
  CHECK(!asked(999));
  CHECK(!asked(2));
}

}  // namespace
}  // namespace engram::test
