// The queue alone: whose reads go first, what devices may hold, and that nobody sleeps while there
// is work. Io threads are played here.
#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "read_queue.h"
#include "support.h"

namespace engram::test {
namespace {

// Reads one after another of the files given; a read's tag is its place among them.
struct Source final : ReadSource {
  explicit Source(std::vector<std::uint32_t> of_files) : files(std::move(of_files)) {}
  Source(std::size_t count, std::uint32_t file) : files(count, file) {}

  std::size_t next(std::span<Read> out, Room& room) override {
    std::size_t count = 0;
    for (; count < out.size() && at < files.size() && room.take(files[at]); ++count, ++at) {
      out[count] = {.file = files[at], .length = 1, .tag = at};
    }
    return count;
  }
  bool exhausted() const override { return at == files.size(); }
  bool wants_out() const override { return leaves && !gave_up; }
  bool give_up() override {
    gave_up = true;
    if (!must_be_read) at = files.size();
    return must_be_read;
  }
  void left_queue() override { ++left; }
  void ended(const Read&, std::int32_t, const std::byte*) override { ++ended_count; }

  std::vector<std::uint32_t> files;
  std::size_t at = 0;
  std::atomic<bool> leaves{false};
  bool must_be_read = false;
  bool gave_up = false;
  std::atomic<int> left{0};
  std::atomic<std::size_t> ended_count{0};
};

// A queue over two files of two devices.
struct Bench {
  explicit Bench(unsigned depth = 1000, unsigned bulk_depth = 1000)
      : devices(files, depth, bulk_depth), queue(devices, metrics) {
    REQUIRE(devices.count() == 2);
  }

  // Takes up to so many reads.
  std::vector<Claimed> claim(std::size_t most, Sleeper* sleeper = nullptr) {
    std::vector<Claimed> claimed(most);
    claimed.resize(queue.claim(claimed, sleeper));
    return claimed;
  }
  void end(const Claimed& claimed) {
    queue.ended(claimed);
    claimed.source->ended(claimed.read, 0, nullptr);
  }

  TemporaryDirectory directory;
  TemporaryDirectory elsewhere{"/dev/shm"};
  std::vector<DataFile> files = [&] {
    std::vector<DataFile> opened;
    opened.emplace_back(directory.write("here", std::vector<std::byte>(4096)));
    opened.emplace_back(elsewhere.write("there", std::vector<std::byte>(4096)));
    return opened;
  }();
  Devices devices;
  ReadMetrics metrics{2};
  ReadQueue queue;
};

std::size_t count_of(const std::vector<Claimed>& claimed, const Source& source) {
  return static_cast<std::size_t>(
      std::ranges::count(claimed, &source, [](const Claimed& c) { return c.source; }));
}

// A ring that sleeps.
struct Ring {
  explicit Ring(ReadQueue& of) : queue(of) {
    sleeper.event_fd = ::eventfd(0, EFD_NONBLOCK);
    queue.add(sleeper);
  }
  ~Ring() { ::close(sleeper.event_fd); }
  bool woken() const {
    std::uint64_t count = 0;
    return ::read(sleeper.event_fd, &count, sizeof count) > 0;
  }
  ReadQueue& queue;
  Sleeper sleeper;
};

TEST_CASE("a decode read goes before all that waits, a prefill read before prefetches") {
  Bench bench;
  Source prefetch(100, 0);
  Source prefill(100, 0);
  Source decode(20, 0);
  bench.queue.push(prefetch, Lane::prefetch);
  CHECK(count_of(bench.claim(10), prefetch) == 10);
  bench.queue.push(prefill, Lane::prefill);
  CHECK(count_of(bench.claim(10), prefill) == 10);
  bench.queue.push(decode, Lane::decode);
  const auto claimed = bench.claim(30);
  CHECK(count_of(claimed, decode) == 20);
  CHECK(count_of(claimed, prefill) == 10);
  CHECK(decode.left == 1);
}

TEST_CASE("sources of a lane take turns") {
  Bench bench;
  Source first(1000, 0);
  Source second(20, 0);
  bench.queue.push(first, Lane::prefill);
  bench.queue.push(second, Lane::prefill);
  const auto claimed = bench.claim(4 * kTurnReads);
  CHECK(count_of(claimed, second) == 20);
  CHECK(count_of(claimed, first) == 4 * kTurnReads - 20);
}

TEST_CASE("no lane starves, whatever is claimed at once") {
  for (const std::size_t at_once : {1, 5, 16, 32}) {
    CAPTURE(at_once);
    Bench bench(100'000, 100'000);
    Source decode(20'000, 0);
    Source prefill(20'000, 0);
    Source prefetch(20'000, 0);
    bench.queue.push(prefetch, Lane::prefetch);
    bench.queue.push(prefill, Lane::prefill);
    bench.queue.push(decode, Lane::decode);
    for (std::size_t got = 0; got < 20'000;) got += bench.claim(at_once).size();
    // 1 in kLaneRun / kTurnReads goes to the lanes below, and of theirs as many to the lowest.
    const double below = static_cast<double>(prefill.at + prefetch.at);
    CHECK(below / 20'000 > 0.9 / 17);
    CHECK(below / 20'000 < 1.2 / 17);
    CHECK(static_cast<double>(prefetch.at) / below > 0.7 / 17);
    CHECK(static_cast<double>(prefetch.at) / below < 1.3 / 17);
  }
}

TEST_CASE(
    "a device holds no more than its depth, of which bulk has a part; devices do not matter to "
    "each other") {
  Bench bench(8, 5);
  Source bulk(100, 0);
  Source other(100, 1);
  Source decode(100, 0);
  bench.queue.push(bulk, Lane::prefill);
  auto held = bench.claim(50);
  CHECK(held.size() == 5);
  bench.queue.push(other, Lane::prefetch);
  CHECK(count_of(bench.claim(50), other) == 5);
  bench.queue.push(decode, Lane::decode);
  CHECK(count_of(bench.claim(50), decode) == 3);
  CHECK(bench.claim(50).empty());
  bench.end(held.back());
  held.pop_back();
  CHECK(count_of(bench.claim(50), decode) == 1);
}

TEST_CASE("a source without room does not keep others of its lane waiting") {
  Bench bench(4, 4);
  Source full(100, 0);
  Source free(3, 1);
  bench.queue.push(full, Lane::prefill);
  bench.queue.push(free, Lane::prefill);
  const auto claimed = bench.claim(50);
  CHECK(count_of(claimed, full) == 4);
  CHECK(count_of(claimed, free) == 3);
}

TEST_CASE("a source that wants out leaves; what others wait for comes back and is read") {
  Bench bench;
  Source gone(100, 0);
  Source awaited(40, 0);
  awaited.must_be_read = true;
  bench.queue.push(gone, Lane::decode);
  bench.queue.push(awaited, Lane::decode);
  CHECK(bench.claim(2 * kTurnReads).size() == 2 * kTurnReads);
  gone.leaves = awaited.leaves = true;
  // One claim: who finds nothing may sleep, or stop.
  CHECK(count_of(bench.claim(100), awaited) == 40 - kTurnReads);
  CHECK(gone.gave_up);
  CHECK(gone.left == 1);
  CHECK(awaited.left == 1);
}

TEST_CASE("a read given back is claimed by the next who comes, before all else") {
  Bench bench(1, 1);
  Source prefill(1, 0);
  Source decode(1, 0);
  bench.queue.push(prefill, Lane::prefill);
  const auto claimed = bench.claim(1);
  REQUIRE(claimed.size() == 1);
  bench.queue.push(decode, Lane::decode);
  bench.queue.ended(claimed[0]);
  bench.queue.give_back(claimed[0]);
  const auto again = bench.claim(2);
  REQUIRE(again.size() == 1);
  CHECK(again[0].source == &prefill);
  CHECK(prefill.left == 1);
}

TEST_CASE("a push wakes one sleeping ring, and that one the next when it leaves something") {
  Bench bench;
  Ring first(bench.queue);
  Ring second(bench.queue);
  CHECK(bench.claim(10, &first.sleeper).empty());
  CHECK(bench.claim(10, &second.sleeper).empty());
  Source source(25, 0);
  bench.queue.push(source, Lane::prefill);
  CHECK(first.woken());
  CHECK_FALSE(second.woken());
  CHECK(bench.claim(10, &first.sleeper).size() == 10);
  CHECK(second.woken());
  CHECK(bench.claim(20, &second.sleeper).size() == 15);
  // The first has not found the queue empty: it will look again by itself.
  Source more(1, 0);
  bench.queue.push(more, Lane::prefill);
  CHECK_FALSE(first.woken());
  CHECK(second.woken());
}

TEST_CASE("a ring that leaves passes on the wake-up it was given") {
  Bench bench;
  Ring leaving(bench.queue);
  CHECK(bench.claim(1, &leaving.sleeper).empty());
  Source source(1, 0);
  std::vector<Claimed> claimed(1);
  std::thread thread([&] { bench.queue.wait_and_claim(claimed); });
  // Long enough, most times, for the thread to wait; if it does not yet, it finds the read.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  bench.queue.push(source, Lane::decode);
  bench.queue.remove(leaving.sleeper);
  thread.join();
  CHECK(claimed[0].source == &source);
}

TEST_CASE("a thread that found no room is woken when another leaves it something") {
  Bench bench(2, 2);
  Source source({0, 0, 0, 1});
  bench.queue.push(source, Lane::decode);
  const auto held = bench.claim(2);
  REQUIRE(held.size() == 2);
  std::vector<Claimed> claimed(1);
  std::thread thread([&] { bench.queue.wait_and_claim(claimed); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  bench.end(held[0]);
  const auto third = bench.claim(1);
  thread.join();
  CHECK(third.size() == 1);
  CHECK(claimed[0].source == &source);
}

TEST_CASE("a queue that stops hands out what it holds, then nothing") {
  Bench bench;
  Source source(40, 0);
  bench.queue.push(source, Lane::prefetch);
  bench.queue.stop();
  std::vector<Claimed> claimed(32);
  CHECK(bench.queue.wait_and_claim(claimed) == 32);
  CHECK(bench.queue.wait_and_claim(claimed) == 8);
  CHECK(bench.queue.wait_and_claim(claimed) == 0);
  CHECK(source.left == 1);
}

TEST_CASE("among many threads each read is handed out once and every source leaves once") {
  Bench bench(6, 4);
  std::deque<Source> sources;
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::uint32_t> files(draw<std::size_t>(random, 1, 60));
    for (std::uint32_t& file : files) file = draw<std::uint32_t>(random, 0, 1);
    Source& source = sources.emplace_back(std::move(files));
    source.must_be_read = i % 3 == 0;
  }
  std::atomic<unsigned> too_many{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 5; ++i) {
    threads.emplace_back([&] {
      Claimed one;
      while (bench.queue.wait_and_claim({&one, 1}) > 0) {
        if (bench.devices.in_flight(one.read.file) > 6) ++too_many;
        bench.end(one);
      }
    });
  }
  in_parallel(3, [&](unsigned number) {
    for (std::size_t i = number; i < sources.size(); i += 3) {
      bench.queue.push(sources[i], static_cast<Lane>(i % kLanes));
      if (i % 4 == 0) sources[i].leaves = true;
    }
  });
  bench.queue.stop();
  for (std::thread& thread : threads) thread.join();
  CHECK(too_many == 0);
  CHECK(bench.devices.in_flight(0) == 0);
  CHECK(bench.devices.in_flight(1) == 0);
  for (const Source& source : sources) {
    CHECK(source.left == 1);
    CHECK(source.exhausted());
    if (!source.gave_up) CHECK(source.ended_count == source.files.size());
  }
}

}  // namespace
}  // namespace engram::test
