// Clients that keep the rules: every row is the table's, every failure has its reason, and nothing
// is left behind.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "shm_world.h"

namespace engram::test {
namespace {

constexpr std::chrono::nanoseconds kNoSpin{0};

// Tokens of one sequence with look-back, of all FP4 layers.
struct TokensAsked {
  std::vector<std::int32_t> tokens, history;
  std::vector<std::uint32_t> layers{1, 3};
  std::array<std::uint32_t, 2> lengths{};

  shm::Call call() {
    lengths = {static_cast<std::uint32_t>(tokens.size()),
               static_cast<std::uint32_t>(history.size())};
    return {.entry = {.kind = shm::Kind::tokens,
                      .positions = lengths[0],
                      .sequences = 1,
                      .history = lengths[1],
                      .layers = static_cast<std::uint16_t>(layers.size())},
            .keys = {std::as_bytes(std::span(tokens)), std::as_bytes(std::span(history)),
                     std::as_bytes(std::span(lengths)), std::as_bytes(std::span(layers))},
            .payload_bytes = tokens.size() * layers.size() * kColumns * 136,
            .mask_bytes = tokens.size()};
  }
  std::vector<std::byte> expected() const {
    std::vector<std::int64_t> ids(tokens.size() * kTestLayers * kColumns);
    const auto mask = std::make_unique<bool[]>(tokens.size());
    const std::array<std::int64_t, 1> n{static_cast<std::int64_t>(tokens.size())};
    const std::array<std::int64_t, 1> h{static_cast<std::int64_t>(history.size())};
    small_hash()->rows(tokens, n, history, h, ids.data(), mask.get());
    std::vector<std::byte> bytes;
    for (std::size_t position = 0; position < tokens.size(); ++position) {
      for (const std::uint32_t layer : layers) {
        for (std::size_t column = 0; column < kColumns; ++column) {
          const std::int64_t id = ids[(position * kTestLayers + layer - 1) * kColumns + column];
          const auto row = formula_row(layer, static_cast<std::uint64_t>(id), RowKind::fp4);
          bytes.insert(bytes.end(), row.begin(), row.end());
        }
      }
    }
    return bytes;
  }
};

TEST_CASE("rows, tokens and their mask are exact, whatever the cache holds") {
  const ShmWorld world(false);
  const auto client = world.attach();
  Random random(1);
  for (int round = 0; round < 30; ++round) {
    const std::int64_t layer = draw<std::int64_t>(random, 1, 4);
    CHECK(complaint(*client, draw_rows(random, layer, draw<std::size_t>(random, 0, 40))) == "");
  }
  TokensAsked asked{.tokens = {5, 9, 17, 5, 5, 99}, .history = {3, -1, 4}};
  for (int round = 0; round < 2; ++round) {
    const auto ticket = client->submit(asked.call(), soon());
    REQUIRE(ticket->wait(soon(), kNoSpin));
    REQUIRE(ticket->status() == shm::Status::ok);
    CHECK(same(ticket->rows(), asked.expected()));
    CHECK(ticket->mask()[1] == std::byte{1});
    CHECK(ticket->mask()[2] == std::byte{0});
    CHECK(ticket->answer().stats[0] == 6 * 2 * kColumns);
  }
}

TEST_CASE("an answer of many blocks comes whole, and a small one is not kept behind it") {
  shm::Limits limits;
  limits.block_bytes = 8 * 136;
  const ShmWorld world(false, limits);
  const auto client = world.attach(8 << 20);
  Random random(2);
  const RowsAsked large = draw_rows(random, kTwoCopies, 20'000);
  shm::Call call = large.call();
  call.entry.lane = 1 + static_cast<std::uint8_t>(Lane::prefill);
  const auto bulk = client->submit(call, soon());
  for (int round = 0; round < 20; ++round) {
    CHECK(complaint(*client, draw_rows(random, kPacked, 3)) == "");
  }
  REQUIRE(bulk->wait(soon(), kNoSpin));
  CHECK(bulk->status() == shm::Status::ok);
  CHECK(same(bulk->rows(), large.expected()));
}

TEST_CASE("a row that cannot be read fails its request by name, and no other") {
  const ShmWorld world(true);
  const auto client = world.attach();
  const std::string broken = complaint(*client, {.layer = kPacked, .ids = {1, 1003}});
  CHECK(broken.find("layer 3, row 1003 could not be read") == 0);
  CHECK(world.server->damage() == broken);
  CHECK(complaint(*client, {.layer = kPacked, .ids = {1, 1004}}) == "");
}

TEST_CASE("what makes no sense is refused with a sentence, and does no harm") {
  const ShmWorld world(false);
  const auto client = world.attach();
  const auto refusal = [&](const RowsAsked& asked, auto change) {
    shm::Call call = asked.call();
    change(call);
    const auto ticket = client->submit(call, soon());
    REQUIRE(ticket->wait(soon(), kNoSpin));
    CHECK(ticket->status() != shm::Status::ok);
    return ticket->message();
  };
  const RowsAsked good{.layer = 1, .ids = {1, 2, 3}};
  const auto says = [&](const std::string& text, const std::string& part) {
    CHECK_MESSAGE(text.find(part) != std::string::npos, text);
  };
  says(refusal({.layer = 7, .ids = {1}}, [](shm::Call&) {}),
       "layer 7 has no table here; the layers served are 1, 2, 3, 4");
  says(refusal({.layer = 1, .ids = {0, 3001}}, [](shm::Call&) {}),
       "layer 1, position 1: row id 3001 is outside -1 to 3000");
  says(refusal(good, [](shm::Call& call) { call.entry.positions = 4; }), "the keys are said to");
  says(refusal(good, [](shm::Call& call) { --call.payload_bytes; }), "but room for 407 was given");
  says(refusal(good, [](shm::Call& call) { call.entry.format = 9; }), "format 9 is not one of");
  says(refusal(good, [](shm::Call& call) { call.entry.lane = 4; }), "lane 4 is not one of");
  says(refusal(good, [](shm::Call& call) { call.entry.kind = shm::Kind{9}; }), "kind is 9");
  says(refusal(good, [](shm::Call& call) { call.entry.column_end = 3; }), "`columns` goes with");
  says(refusal(good, [](shm::Call& call) { call.entry.zero[50] = 1; }), "must be zero");
  const shm::Pin pin{.of = 1, .digest = digest_of(9)};
  const auto pinned = [&](shm::Call& call) {
    call.entry.pins = 1;
    call.keys.push_back(std::as_bytes(std::span(&pin, 1)));
  };
  says(refusal(good, pinned), "the table of layer 1 has digest 0101");
  CHECK(complaint(*client, good) == "");
}

TEST_CASE("a request without an answer in its time says so; one that is given up leaves no trace") {
  const ShmWorld world(false);
  const auto client = world.attach(8 << 20);
  Random random(3);
  const RowsAsked asked = draw_rows(random, kTwoCopies, 20'000);
  shm::Call call = asked.call();
  call.entry.timeout_ns = 1;
  const auto late = client->submit(call, soon());
  REQUIRE(late->wait(soon(), kNoSpin));
  CHECK(late->status() == shm::Status::deadline_exceeded);
  late->release();
  for (int round = 0; round < 200; ++round) {
    // Two of these fit: the third has to wait for the first one's end.
    const auto dropped = client->submit(asked.call(), soon());
    REQUIRE(dropped != nullptr);
  }
  CHECK(complaint(*client, asked) == "");
  CHECK(until([&] { return world.engine->in_flight_bytes() == 0; }));
}

TEST_CASE("threads share a client, and clients a server") {
  const ShmWorld world(true, {}, 2 << 20);
  std::atomic<int> wrong{0};
  const std::array clients{world.attach(), world.attach()};
  in_parallel(4, [&](unsigned thread) {
    Random random(10 + thread);
    for (int round = 0; round < 100; ++round) {
      const std::int64_t layer = draw<std::int64_t>(random, 1, 2);
      wrong += complaint(*clients[thread % 2], draw_rows(random, layer, 50)) != "";
    }
  });
  CHECK(wrong.load() == 0);
  CHECK(world.server->counts().clients == 2);
  CHECK(world.server->counts().requests == 400);
}

TEST_CASE("every request is counted once, by how it ended, before its client hears of it") {
  const ShmWorld world(true);
  const auto client = world.attach();
  const auto answered = [&](Lane lane, Format format) {
    const auto counts = world.server->lookups().answered(lane, format).counts();
    return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  };
  const auto ask = [&](const RowsAsked& asked, Format format, Lane lane) {
    shm::Call call = asked.call();
    call.entry.format = static_cast<std::uint8_t>(format);
    call.entry.lane = 1 + static_cast<std::uint8_t>(lane);
    call.payload_bytes = asked.ids.size() * output_bytes(RowKind::fp4, format);
    const auto ticket = client->submit(call, soon());
    REQUIRE(ticket->wait(soon(), kNoSpin));
    return ticket->status();
  };
  std::uint64_t number = 0;
  for (const Lane lane : kAllLanes) {
    for (const Format format : kAllFormats) {
      for (std::uint64_t i = 0; i <= number; ++i) {
        CHECK(ask({.layer = 1, .ids = {1, 2}}, format, lane) == shm::Status::ok);
        CHECK(answered(lane, format) == i + 1);
      }
      ++number;
    }
  }
  CHECK(ask({.layer = 7, .ids = {1}}, Format::bf16, Lane::decode) == shm::Status::invalid_argument);
  CHECK(ask({.layer = kPacked, .ids = {1003}}, Format::packed, Lane::decode) ==
        shm::Status::data_loss);
  const auto refused = client->submit({.entry = {.kind = shm::Kind{9}}}, soon());
  REQUIRE(refused->wait(soon(), kNoSpin));
  const shm::Server::Counts counts = world.server->counts();
  std::array<std::uint64_t, shm::kStatuses> expected{};
  expected[static_cast<std::size_t>(shm::Status::invalid_argument)] = 2;
  expected[static_cast<std::size_t>(shm::Status::data_loss)] = 1;
  CHECK(counts.failures == expected);
  CHECK(counts.requests == number * (number + 1) / 2 + 3);
  std::uint64_t all = 0;
  for (const Lane lane : kAllLanes) {
    for (const Format format : kAllFormats) all += answered(lane, format);
  }
  CHECK(all == number * (number + 1) / 2);
}

TEST_CASE("requests are noted as they were asked, within their bounds, and outlive the server") {
  ShmWorld world(false);
  shm::Tap& tap = world.server->tap();
  const auto clients = std::array{world.attach(), world.attach()};
  CHECK(complaint(*clients[0], {.layer = 1, .ids = {1}}) == "");
  CHECK(tap.take().noted.empty());  // nobody has asked for them
  tap.allow(1 << 20);
  const std::int64_t before = now_ns();
  std::vector<shm::Tap::Noted> noted;
  std::atomic<bool> over{false};
  std::atomic<int> wrong{0};
  std::uint64_t missing = 0;
  std::thread taker([&] {
    for (bool last = false; !last;) {
      last = over.load();
      shm::Tap::Taken taken = tap.take();
      missing += taken.missing;
      for (shm::Tap::Noted& one : taken.noted) {
        one.room.reset();
        noted.push_back(std::move(one));
      }
    }
  });
  // Each thread asks for rows of its own: 1, 2, 3... of them.
  in_parallel(2, [&](unsigned thread) {
    for (std::size_t count = 1; count <= 100; ++count) {
      const RowsAsked asked{.layer = 1 + thread, .ids = std::vector<std::int64_t>(count, 7)};
      wrong += complaint(*clients[thread], asked) != "";
    }
  });
  over.store(true);
  taker.join();
  CHECK(wrong.load() == 0);
  CHECK(missing == 0);
  std::array<std::size_t, 2> seen{};
  REQUIRE(noted.size() == 200);
  for (const shm::Tap::Noted& one : noted) {
    const LayerKeys& keys = one.request->keys.front();
    std::size_t& count = seen.at(static_cast<std::size_t>(keys.layer - 1));
    CHECK(one.request->positions == ++count);  // in order
    CHECK(keys.id(count - 1, 0) == 7);
    CHECK(one.lane == Lane::decode);
    CHECK(one.at_ns >= before);
  }

  // One that is alone larger than what may wait, and one that would be but for those that wait.
  tap.allow(2'000);
  CHECK(complaint(*clients[0], {.layer = 1, .ids = std::vector<std::int64_t>(300, 1)}) == "");
  CHECK(complaint(*clients[0], {.layer = 1, .ids = std::vector<std::int64_t>(100, 2)}) == "");
  CHECK(complaint(*clients[0], {.layer = 1, .ids = std::vector<std::int64_t>(100, 3)}) == "");
  shm::Tap::Taken first = tap.take();
  CHECK(first.missing == 2);
  REQUIRE(first.noted.size() == 1);
  CHECK(complaint(*clients[0], {.layer = 1, .ids = std::vector<std::int64_t>(100, 4)}) == "");
  CHECK(tap.take().missing == 1);  // what was taken is not dropped yet
  first.noted.clear();
  CHECK(complaint(*clients[0], {.layer = 1, .ids = std::vector<std::int64_t>(100, 5)}) == "");
  const shm::Tap::Taken second = tap.take();
  REQUIRE(second.noted.size() == 1);
  CHECK(second.missing == 0);
  world.server.reset();
  CHECK(second.noted.front().request->keys.front().id(99, 0) == 5);
}

TEST_CASE("a full server refuses, and a client that leaves makes room") {
  shm::Limits limits;
  limits.clients = 2;
  limits.bytes = 4 << 20;
  const ShmWorld world(false, limits);
  const auto refusal = [&](std::uint64_t bytes) -> std::string {
    try {
      world.attach(bytes);
    } catch (const shm::NotWelcome& error) {
      CHECK(error.status == shm::Status::resource_exhausted);
      return error.what();
    }
    return "";
  };
  auto first = world.attach();
  CHECK(refusal(4 << 20).find("--shm-bytes") != std::string::npos);
  const auto second = world.attach();
  CHECK(refusal(1 << 20).find("all that --shm-clients allows") != std::string::npos);
  first.reset();
  CHECK(until([&] { return world.server->counts().clients == 1; }));
  const auto third = world.attach();
  CHECK(complaint(*third, {.layer = 1, .ids = {7}}) == "");
  CHECK(world.server->take_notes().size() == 2);
}

TEST_CASE("four clients may have a quarter each") {
  shm::Limits limits;
  limits.client_bytes = 1 << 20;
  limits.bytes = 4 << 20;
  const ShmWorld world(false, limits);
  std::vector<std::shared_ptr<shm::Client>> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(world.attach(limits.client_bytes));
  CHECK(world.server->counts().clients == 4);
  CHECK_THROWS_AS(world.attach(), shm::NotWelcome);
}

TEST_CASE("rows that are worked on for others count here, too") {
  shm::Limits limits;
  limits.admission.rows = 100;
  const ShmWorld world(false, limits);
  const auto client = world.attach();
  const RowsAsked asked{.layer = 1, .ids = {1, 2, 3}};
  Admissions& admissions = world.engine->admissions();
  const auto admit = [&](std::uint64_t rows) {
    return admissions.admit(rows, Lane::decode, limits.admission, {}, nullptr, now_ns());
  };
  auto others = admit(98);
  CHECK(complaint(*client, asked) ==
        "98 rows are being worked on; 3 more would pass the limit of 100");
  CHECK(admissions.refused(OverloadLimit::rows) == 1);
  others.reset();
  CHECK(complaint(*client, asked) == "");
  CHECK(admissions.rows() == 0);
  others = admit(100);
}

TEST_CASE("a request is released while other threads wait for its answer") {
  const ShmWorld world(false);
  const auto client = world.attach(8 << 20);
  Random random(6);
  const RowsAsked asked = draw_rows(random, kTwoCopies, 20'000);
  for (int round = 0; round < 50; ++round) {
    const auto ticket = client->submit(asked.call(), soon());
    in_parallel(3, [&](unsigned thread) {
      if (thread == 0) return ticket->release();
      try {
        const bool answered = ticket->wait(soon(), kNoSpin);
        CHECK(answered);
        CHECK(ticket->answer().payload_bytes == asked.ids.size() * 136);
      } catch (const std::logic_error& error) {
        CHECK(std::string(error.what()) == "the request was released");
      }
    });
  }
  CHECK(complaint(*client, asked) == "");
}

TEST_CASE("attached and detached a hundred times, nothing is left") {
  const ShmWorld world(false);
  for (int round = 0; round < 100; ++round) {
    const auto client = world.attach();
    CHECK(complaint(*client, {.layer = 1, .ids = {round, 5}}) == "");
  }
  CHECK(until([&] { return world.server->counts().clients == 0; }));
  CHECK(world.server->counts().bytes == 0);
}

TEST_CASE("a server that ends answers or says so, and rows that were answered stay") {
  ShmWorld world(false);
  const auto client = world.attach(8 << 20);
  Random random(4);
  const RowsAsked kept = draw_rows(random, kInterleaved, 100);
  const auto ticket = client->submit(kept.call(), soon());
  REQUIRE(ticket->wait(soon(), kNoSpin));
  std::atomic<int> wrong{0};
  std::atomic<int> lost{0};
  std::thread ender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    world.server->drain();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    world.server->close();
  });
  in_parallel(3, [&](unsigned thread) {
    Random own(20 + thread);
    while (true) {
      try {
        const std::string text = complaint(*client, draw_rows(own, 1, 500));
        if (text == "the server is shutting down")
          ++lost;
        else
          wrong += text != "";
      } catch (const shm::Lost&) {
        ++lost;
        return;
      }
    }
  });
  ender.join();
  CHECK(wrong.load() == 0);
  CHECK(lost.load() >= 3);
  CHECK(same(ticket->rows(), kept.expected()));
  CHECK_FALSE(client->alive());
}

TEST_CASE("tables are opened anew under clients that notice nothing") {
  ShmWorld world(false, {}, 2 << 20);
  const std::array clients{world.attach(), world.attach()};
  std::atomic<int> wrong{0};
  std::atomic<bool> enough{false};
  std::thread opener([&] {
    for (int round = 0; round < 20; ++round) {
      auto reader =
          std::make_shared<Reader>(world.tables.paths(), ReaderOptions{.backend = "pread"});
      auto engine = std::make_shared<Engine>(reader, world.tables.tables(), 2 << 20, 1 << 20);
      world.server->reopen(world.served(engine, reader));
      wrong += !until([&] { return world.server->settled(); });
      // What is settled is closed: a request that still needed it would fail.
      world.engine->close();
      world.reader->close();
      world.engine = engine;
      world.reader = reader;
    }
    enough.store(true);
  });
  in_parallel(4, [&](unsigned thread) {
    Random random(30 + thread);
    while (!enough.load()) {
      wrong += complaint(*clients[thread % 2], draw_rows(random, 1, 500)) != "";
    }
  });
  opener.join();
  CHECK(wrong.load() == 0);
  CHECK(world.server->counts().failures == decltype(shm::Server::Counts::failures){});
  CHECK(world.server->counts().clients == 2);
}

TEST_CASE("damage of tables that are replaced is no damage of those served") {
  shm::Serving serving({.engine = nullptr, .reader = nullptr});
  const auto before = serving.now();
  serving.report_damage(*before, "a row is damaged");
  CHECK(serving.damage() == "a row is damaged");
  serving.replace({.engine = nullptr, .reader = nullptr});
  CHECK(serving.damage() == "");
  CHECK_FALSE(serving.settled());
  serving.report_damage(*before, "another row is damaged");
  CHECK(serving.damage() == "");
  serving.report_damage(*serving.now(), "this one matters");
  CHECK(serving.damage() == "this one matters");
}

TEST_CASE("parts of a data area are taken and joined again") {
  shm::Extents extents(1 << 20);
  Random random(5);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> taken;
  for (int round = 0; round < 2000; ++round) {
    const auto bytes = draw<std::uint64_t>(random, 1, 100'000);
    if (const auto offset = extents.take(bytes)) {
      CHECK(*offset % 4096 == 0);
      for (const auto& [other, size] : taken) {
        CHECK((*offset + bytes <= other || other + size <= *offset));
      }
      taken.emplace_back(*offset, bytes);
    } else {
      REQUIRE_FALSE(taken.empty());
      const auto at = draw<std::size_t>(random, 0, taken.size() - 1);
      extents.give(taken[at].first, taken[at].second);
      taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
  for (const auto& [offset, bytes] : taken) extents.give(offset, bytes);
  CHECK(extents.take(1 << 20) == 0);
}

}  // namespace
}  // namespace engram::test
