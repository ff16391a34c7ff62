// Many threads over one engine with next to no cache: every byte is compared, every failure must be
// one that was caused, and nothing may be left behind.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "dequant.h"
#include "engine.h"
#include "support.h"
#include "test_tables.h"

namespace engram::test {
namespace {

constexpr std::size_t kWidth = 24;
constexpr std::uint64_t kGrams = 15;            // n-grams of each order that texts are made of
constexpr std::uint64_t kTightBytes = 2 << 20;  // of budget: now and then one has to wait

// What a batch asks for, and what it must bring.
struct Request {
  std::vector<std::int64_t> layers{};
  std::vector<std::vector<std::int64_t>> ids{};  // of each layer, [positions, width]
  std::size_t width = kWidth;
  Order order{};
  Format format = Format::packed;

  std::vector<LayerKeys> keys() const {
    std::vector<LayerKeys> keys;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      keys.push_back({.layer = layers[i],
                      .ids = ids[i].data(),
                      .position_stride = static_cast<std::int64_t>(width),
                      .column_stride = 1});
    }
    return keys;
  }
  // Calls each(layer, id) for every wanted row, in the order of a gather.
  template <typename Each>
  void for_each(Each each) const {
    for (std::size_t position = 0; position < order.positions; ++position) {
      for (std::size_t i = 0; i < layers.size(); ++i) {
        for (std::size_t c = order.columns.begin; c < order.columns.end; ++c) {
          each(layers[i], ids[i][position * width + c]);
        }
      }
    }
  }
};

// FP4 and FP8 together in formats that both have.
std::vector<std::int64_t> draw_layers(Random& random, Format format) {
  if (draw(random, 0, 4) == 0) return {kInterleaved};
  std::vector<std::int64_t> layers{kTwoCopies, kPacked, kTruncated, kMended};
  if (format != Format::packed) layers.push_back(kInterleaved);
  std::shuffle(layers.begin(), layers.end(), random);
  if (draw(random, 0, 3) != 0) layers.resize(1);
  return layers;
}

// Rows of n-grams, so that groups come again; some zero rows, and anything outside the columns.
Request draw_request(Random& random) {
  Request request;
  request.format = static_cast<Format>(draw(random, 0, 3));
  request.layers = draw_layers(random, request.format);
  const bool whole = draw(random, 0, 3) != 0;
  request.width = whole ? kWidth : draw<std::size_t>(random, 1, 5);
  Columns& columns = request.order.columns;
  columns.group_rows = whole ? kGroupRows : 1;
  columns.begin = draw(random, 0, 1) * draw<std::size_t>(random, 0, request.width - 1);
  columns.end = draw<std::size_t>(random, columns.begin, request.width);
  if (draw(random, 0, 1) == 0) columns.end = request.width;
  request.order.positions = draw<std::size_t>(random, 0, draw(random, 0, 3) == 0 ? 12 : 2);
  request.order.lane = static_cast<Lane>(draw(random, 0, 2));
  const bool zeros = draw(random, 0, 2) == 0;
  const bool junk = draw(random, 0, 2) == 0;
  request.ids.resize(request.layers.size());
  for (std::vector<std::int64_t>& ids : request.ids) {
    std::uint64_t gram = 0;
    for (std::size_t at = 0; at < request.order.positions * request.width; ++at) {
      const std::size_t column = at % request.width;
      if (column % columns.group_rows == 0) gram = random() % kGrams;
      ids.push_back(static_cast<std::int64_t>(mixed(gram << 8 | column) % TestTables::kRows));
      const bool wanted = column >= columns.begin && column < columns.end;
      if (wanted && zeros && draw(random, 0, 9) == 0) ids[at] = -1;
      if (!wanted && junk) ids[at] = static_cast<std::int64_t>(random());
    }
  }
  return request;
}

std::vector<std::byte> expected_rows(const Request& request) {
  std::vector<std::byte> expected;
  request.for_each([&](std::int64_t layer, std::int64_t id) {
    const RowKind kind = TestTables::kind_of(layer);
    std::vector<std::byte> row(output_bytes(kind, request.format));
    if (id >= 0) {
      const auto packed = formula_row(layer, static_cast<std::uint64_t>(id), kind);
      row_converter(kind, request.format, Simd::scalar)(packed.data(), row.data());
    }
    expected.insert(expected.end(), row.begin(), row.end());
  });
  return expected;
}

// The first thing that is wrong with a batch that is done; empty: nothing.
std::string complaint(const Request& request, const Batch& batch, const TestTables& tables,
                      const std::set<std::int32_t>& excused) {
  std::map<std::tuple<std::int64_t, std::int64_t>, std::int32_t> bad;
  request.for_each([&](std::int64_t layer, std::int64_t id) {
    if (id < 0) return;
    const std::int32_t error = tables.error_of(layer, static_cast<std::uint64_t>(id));
    if (error != 0) bad[{layer, id}] = error;
  });
  if (batch.failure()) {
    const RowFailure failure = *batch.failure();
    if (excused.contains(failure.error)) return "";
    const auto found = bad.find({failure.layer, failure.row});
    return found != bad.end() && found->second == failure.error
               ? ""
               : "failed for no reason: " + failure_text(failure);
  }
  if (!bad.empty()) return "a row that cannot be read was";
  std::vector<std::byte> got(batch.gathered_bytes(0, batch.positions(), request.format));
  batch.gather(0, batch.positions(), request.format, got.data());
  return got == expected_rows(request) ? "" : "rows are not the table's";
}

// The same of what the cache has of it now, copied to just behind `misaligned` other bytes. None: a
// batch must do it.
std::optional<BatchStats> copy_hits(const Request& request, Engine& engine, std::size_t misaligned,
                                    std::string& complaint) {
  const std::size_t bytes = engine.gathered_bytes(request.keys(), request.order, request.format);
  std::vector<std::byte> out(misaligned + bytes, std::byte{0xA5});
  const auto stats =
      engine.copy_hits(request.keys(), request.order, request.format, out.data() + misaligned);
  std::vector<std::byte> expected(misaligned, std::byte{0xA5});
  if (stats) {
    const std::vector<std::byte> rows = expected_rows(request);
    expected.insert(expected.end(), rows.begin(), rows.end());
  }
  out.resize(expected.size());
  if (out != expected) complaint = "rows from the cache are not the table's";
  return stats;
}

std::string complaint_of_stats(const Request& request, const BatchStats& stats) {
  std::uint64_t rows = 0;
  request.for_each([&](std::int64_t, std::int64_t) { ++rows; });
  if (stats.rows != rows) return "the number of rows is not what was asked for";
  if (stats.cached + stats.joined > stats.distinct) return "more rows found than there are";
  return stats.distinct <= rows ? "" : "more distinct rows than rows";
}

struct Setup {
  std::string backend;
  unsigned threads;
  unsigned depth;
  std::uint64_t sets;  // of the cache; 0: none
  int rounds;          // of each user
};

std::uint64_t cache_bytes(std::uint64_t sets) {
  return sets * RowCache::bytes_min(packed_bytes(RowKind::fp8));
}

// An engine over test tables, and what its users found wrong.
struct World {
  explicit World(const Setup& setup, bool with_faults = true,
                 std::uint64_t budget_bytes = kTightBytes)
      : tables(with_faults),
        reader(std::make_shared<Reader>(tables.paths(), ReaderOptions{.backend = setup.backend,
                                                                      .depth = setup.depth,
                                                                      .threads = setup.threads})),
        engine(std::make_unique<Engine>(reader, tables.tables(), budget_bytes,
                                        cache_bytes(setup.sets))) {
    tables.truncate();
  }

  void complain(const std::string& text) {
    if (text.empty()) return;
    const std::lock_guard lock(mutex);
    if (complaints.size() < 5) complaints.push_back(text);
  }

  TestTables tables;
  std::shared_ptr<Reader> reader;
  std::unique_ptr<Engine> engine;
  std::atomic<std::uint64_t> hits{0};  // groups
  std::mutex mutex;
  std::vector<std::string> complaints;
};

struct Held {
  Request request;
  std::shared_ptr<Batch> batch;
};

// One of the threads: submits, drops, waits, compares, and compares again what it kept.
class User {
 public:
  // excused: errors that may come to every batch. lasting: nobody closes the engine.
  User(World& world, unsigned seed, std::set<std::int32_t> excused = {}, bool lasting = true)
      : world_(world), random_(seed), excused_(std::move(excused)), lasting_(lasting) {}

  void work(int rounds) {
    for (int round = 0; round < rounds && !closed_; ++round) {
      Request request = draw_request(random_);
      std::set<std::int32_t> excused = excused_;
      if (draw(random_, 0, 9) == 0) {
        request.order.deadline_s = draw(random_, 0, 1) * 1e-4;
        excused.insert(ETIMEDOUT);
      }
      hits(draw(random_, 0, 3) == 0 ? request : last_);
      const std::shared_ptr<Batch> batch = submit(request);
      if (batch == nullptr || draw(random_, 0, 3) == 0) continue;  // dropped at once
      while (!batch->wait(1000)) continue;
      world_.complain(complaint(request, *batch, world_.tables, excused));
      world_.complain(complaint_of_stats(request, batch->stats()));
      last_ = request;  // its rows may be pushed out from now on
      if (!batch->failure() && draw(random_, 0, 3) == 0) keep({std::move(request), batch});
    }
    for (const Held& held : held_) check(held);
  }

 private:
  std::shared_ptr<Batch> submit(const Request& request) {
    while (true) {
      try {
        return world_.engine->submit(request.keys(), request.order);
      } catch (const Overloaded&) {
        held_.clear();
        std::this_thread::yield();
      } catch (const std::runtime_error& error) {
        if (lasting_) world_.complain(error.what());
        closed_ = true;
        return nullptr;
      }
    }
  }
  void hits(const Request& request) {
    try {
      std::string complaint;
      const auto stats =
          copy_hits(request, *world_.engine, draw<std::size_t>(random_, 0, 16), complaint);
      world_.complain(complaint);
      if (!stats) return;
      world_.hits += stats->groups;
      world_.complain(complaint_of_stats(request, *stats));
    } catch (const std::runtime_error& error) {
      if (lasting_) world_.complain(error.what());
      closed_ = true;
    }
  }
  // Pinned meanwhile, whatever the others push out.
  void keep(Held held) {
    held_.push_back(std::move(held));
    if (held_.size() < 3) return;
    check(held_.front());
    held_.pop_front();
  }
  void check(const Held& held) {
    world_.complain(complaint(held.request, *held.batch, world_.tables, {}));
  }

  World& world_;
  Random random_;
  std::set<std::int32_t> excused_;
  bool lasting_;
  bool closed_ = false;
  std::deque<Held> held_;
  Request last_;
};

// What a thread of the engine still holds after a batch is done, it gives back at once.
bool drains(const Engine& engine) {
  for (int tries = 0; tries < 10'000; ++tries) {
    if (engine.in_flight_bytes() == 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// A batch of many single rows takes every slot there is, unless one is pinned still.
bool every_slot_can_be_taken(Engine& engine) {
  RowCache* const cache = engine.cache();
  if (cache == nullptr) return true;
  std::vector<std::int64_t> ids(TestTables::kRows);  // a hundred for each set, or thereabouts
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  const std::uint64_t before = cache->counters().overflows;
  const LayerKeys keys{
      .layer = kTwoCopies, .ids = ids.data(), .position_stride = 1, .column_stride = 1};
  const auto batch = engine.submit({keys}, {.positions = ids.size(), .columns = {0, 1, 1}});
  while (!batch->wait(1000)) continue;
  return cache->counters().overflows - before == ids.size() - cache->slots();
}

const std::vector<Setup> kSetups{
    {.backend = "auto", .threads = 1, .depth = 1, .sets = 1, .rounds = 30},
    {.backend = "auto", .threads = 3, .depth = 16, .sets = 2, .rounds = 150},
    {.backend = "auto", .threads = 2, .depth = 4, .sets = 0, .rounds = 40},
    {.backend = "auto", .threads = 2, .depth = 64, .sets = 16, .rounds = 150},
    {.backend = "pread", .threads = 0, .depth = 8, .sets = 4, .rounds = 150},
    {.backend = "pread", .threads = 12, .depth = 3, .sets = 1, .rounds = 60},
    {.backend = "mmap", .threads = 3, .depth = 1, .sets = 2, .rounds = 150},
};

TEST_CASE(
    "whatever many threads do to an engine, each gets its rows or the error that was caused") {
  unsigned seed = 0;
  std::uint64_t hits = 0;
  for (const Setup& setup : kSetups) {
    INFO(setup.backend << ", " << setup.threads << " threads, depth " << setup.depth << ", "
                       << setup.sets << " sets");
    World world(setup);
    seed += 100;
    in_parallel(5, [&](unsigned number) {
      User user(world, seed + number);
      user.work(setup.rounds);
      // Midway: what is read from now on comes from memory, row by row or all of it.
      if (number == 0) world.engine->load_scales(kTwoCopies);
      if (number == 1) world.engine->load_resident(kInterleaved);
      if (number == 2) world.engine->load_resident(kTruncated);
      user.work(setup.rounds);
    });
    for (const std::string& complaint : world.complaints) FAIL_CHECK(complaint);
    CHECK(drains(*world.engine));
    CHECK(every_slot_can_be_taken(*world.engine));
    CHECK(drains(*world.engine));
    world.engine->close();
    hits += world.hits;
  }
  CHECK(hits > 1000);
}

TEST_CASE("hits are those of a batch of the same rows, and are counted as it counts them") {
  for (const std::uint64_t sets : {4, 64}) {  // some groups have left, or none has
    World world({.backend = "pread", .threads = 2, .depth = 8, .sets = sets, .rounds = 0}, false,
                64 << 20);
    Random random(sets);
    std::uint64_t groups = 0;
    for (int round = 0; round < 600; ++round) {
      const Request request = draw_request(random);
      std::shared_ptr<Batch> batch;
      for (int pass = 0; pass < 2; ++pass) {  // the second time, it may be in the cache
        batch = world.engine->submit(request.keys(), request.order);
        while (!batch->wait(1000)) continue;
        REQUIRE(complaint(request, *batch, world.tables, {}) == "");
      }
      std::string wrong;
      const auto stats = copy_hits(request, *world.engine, draw<std::size_t>(random, 0, 16), wrong);
      CHECK(wrong == "");
      if (!stats) continue;
      CHECK(stats->rows == batch->stats().rows);
      CHECK(stats->distinct == batch->stats().distinct);
      CHECK(stats->cached == stats->distinct);
      CHECK(stats->joined + stats->reads + stats->read_bytes == 0);
      CHECK(stats->groups == batch->stats().groups);
      groups += stats->groups;
    }
    CHECK(groups > 1000);
  }
}

TEST_CASE("closing a busy engine, or its reader first, leaves every batch done") {
  unsigned seed = 1000;
  for (const Setup& setup : kSetups) {
    for (const bool reader_first : {false, true}) {
      INFO(setup.backend << ", reader first: " << reader_first);
      World world(setup);
      seed += 100;
      // Reads that a closed reader has not begun are cancelled; an engine finishes its own.
      const auto excused = reader_first ? std::set{ECANCELED} : std::set<std::int32_t>{};
      in_parallel(4, [&](unsigned number) {
        User user(world, seed + number, excused, false);
        if (number > 0) return user.work(1 << 20);
        world.engine->load_resident(kTwoCopies);
        user.work(20);
        if (reader_first) world.reader->close();
        world.engine->close();
      });
      for (const std::string& complaint : world.complaints) FAIL_CHECK(complaint);
      CHECK(drains(*world.engine));
    }
  }
}

TEST_CASE("batches keep their rows when engine and reader are gone") {
  for (const Setup& setup : kSetups) {
    auto world = std::make_unique<World>(setup, false, 64 << 20);
    const TestTables& tables = world->tables;
    Random random(7);
    std::vector<Held> held;
    for (int i = 0; i < 20; ++i) {
      Request request = draw_request(random);
      std::shared_ptr<Batch> batch = world->engine->submit(request.keys(), request.order);
      held.push_back({std::move(request), std::move(batch)});
    }
    world->engine.reset();
    world->reader.reset();
    for (const Held& one : held) {
      REQUIRE(one.batch->done());
      CHECK(complaint(one.request, *one.batch, tables, {}) == "");
    }
  }
}

TEST_CASE("whoever asks for a row, and when, it is read once") {
  for (Setup setup : kSetups) {
    setup.sets = 64;  // holds all that is asked for
    World world(setup, false);
    std::atomic<std::uint64_t> reads{0};
    std::mutex mutex;
    std::set<std::int64_t> wanted;
    in_parallel(6, [&](unsigned number) {
      Random random(number);
      for (int round = 0; round < 40; ++round) {
        Request request{.layers = {kPacked}};
        request.order = {.positions = 8, .lane = static_cast<Lane>(draw(random, 0, 2))};
        Columns& columns = request.order.columns;
        columns = {.begin = draw<std::size_t>(random, 0, 23), .end = 24, .group_rows = kGroupRows};
        columns.end = draw<std::size_t>(random, columns.begin + 1, 24);
        std::vector<std::int64_t>& ids = request.ids.emplace_back();
        for (std::size_t i = 0; i < request.order.positions; ++i) {
          const auto gram = draw<std::int64_t>(random, 0, 39);
          for (std::int64_t c = 0; c < 24; ++c) ids.push_back(c * 100 + gram);
        }
        const auto batch = world.engine->submit(request.keys(), request.order);
        while (!batch->wait(1000)) continue;
        world.complain(complaint(request, *batch, world.tables, {}));
        reads += batch->stats().reads;
        const std::lock_guard lock(mutex);
        request.for_each([&](std::int64_t, std::int64_t id) {
          wanted.insert(id);  // of one n-gram each
        });
      }
    });
    for (const std::string& complaint : world.complaints) FAIL_CHECK(complaint);
    CHECK(reads.load() == wanted.size());
    CHECK(world.engine->cache()->counters().overflows == 0);
    CHECK(world.engine->cache()->counters().evictions == 0);
  }
}

TEST_CASE("a row is read from every copy before it cannot be read") {
  for (const Setup& setup : kSetups) {
    World world(setup);
    std::vector<std::int64_t> ids(TestTables::kRows);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
    const LayerKeys keys{
        .layer = kMended, .ids = ids.data(), .position_stride = 1, .column_stride = 1};
    const Order order{.positions = ids.size(), .columns = {0, 1, 1}};
    Request all{.layers = {kMended}, .ids = {ids}, .width = 1, .order = order};
    for (int pass = 0; pass < 3; ++pass) {
      const auto batch = world.engine->submit({keys}, order);
      while (!batch->wait(1000)) continue;
      CHECK(complaint(all, *batch, world.tables, {}) == "");
    }
    CHECK(drains(*world.engine));
  }
  // Of a table that has lost its end twice.
  const TestTables tables(true);
  std::vector<std::string> paths = tables.paths();
  const auto reader = std::make_shared<Reader>(paths, ReaderOptions{.backend = "pread"});
  Table twice = tables.tables()[kTruncated - 1];
  twice.copies.push_back(twice.copies.front());
  Engine engine(reader, {twice}, kTightBytes, 0);
  tables.truncate();
  for (const bool lost : {true, false, true}) {
    const std::int64_t id = lost ? TestTables::kRows - 1 : 7;
    const LayerKeys keys{.layer = kTruncated, .ids = &id, .position_stride = 1, .column_stride = 1};
    const auto batch = engine.submit({keys}, {.positions = 1, .columns = {0, 1, 1}});
    while (!batch->wait(1000)) continue;
    CHECK(batch->failure().has_value() == lost);
    if (lost) CHECK(batch->failure()->error == kErrorTruncated);
    CHECK(batch->stats().reads == (lost ? 4 : 2));  // codes and scales, of both copies
  }
}

// Holds the io thread that ends its one read until it is let go.
class Holder final : public ReadSource {
 public:
  Holder(Reader& reader, Lane lane) { reader.submit(*this, lane); }
  ~Holder() override { left_.wait(false); }

  std::size_t next(std::span<Read> out, Room& room) override {
    if (!room.take(0)) return 0;
    out[0] = {.offset = 0, .file = 0, .length = 1};
    asked_ = true;
    return 1;
  }
  bool exhausted() const override { return asked_; }
  void left_queue() override {}
  void ended(const Read&, std::int32_t, const std::byte*) override {
    holds_ = true;
    holds_.notify_all();
    let_go_.wait(false);
    left_ = true;
    left_.notify_all();
  }
  void wait() { holds_.wait(false); }
  void let_go() {
    let_go_ = true;
    let_go_.notify_all();
  }

 private:
  bool asked_ = false;
  std::atomic<bool> holds_{false};
  std::atomic<bool> let_go_{false};
  std::atomic<bool> left_{false};
};

// A row that its first copy cannot give, and an io thread held just before it asks the second.
struct SecondTry {
  explicit SecondTry(std::uint64_t sets)
      : world({.backend = "pread", .threads = 1, .depth = 8, .sets = sets, .rounds = 0}) {
    Holder before(*world.reader, Lane::prefetch);
    before.wait();
    first = submit(Lane::prefetch);
    holder = std::make_unique<Holder>(*world.reader, Lane::prefetch);
    before.let_go();
    holder->wait();
    reads = world.reader->counters().reads;
  }
  std::shared_ptr<Batch> submit(Lane lane) const {
    const LayerKeys keys{.layer = kMended, .ids = &id, .position_stride = 1, .column_stride = 1};
    return world.engine->submit({keys}, {.positions = 1, .columns = {0, 1, 1}, .lane = lane});
  }
  // Why a batch is not the row; empty: it is.
  std::string complaint_of(Batch& batch) {
    while (!batch.wait(1000)) continue;
    const Request request{.layers = {kMended},
                          .ids = {{id}},
                          .width = 1,
                          .order = {.positions = 1, .columns = {0, 1, 1}}};
    return complaint(request, batch, world.tables, {});
  }

  static constexpr std::int64_t id = 3;  // broken in the first copy, whose record is one read
  World world;
  std::shared_ptr<Batch> first;
  std::unique_ptr<Holder> holder;
  std::uint64_t reads = 0;
};

TEST_CASE("what nobody waits for any more is not read from the next copy") {
  for (const std::uint64_t sets : {0, 4}) {
    SecondTry world(sets);
    world.first.reset();
    world.holder->let_go();
    CHECK(drains(*world.world.engine));
    CHECK(world.world.reader->counters().reads == world.reads);
  }
}

TEST_CASE("what another batch waits for is read from the next copy, whoever gave it up") {
  SecondTry world(4);
  const auto second = world.submit(Lane::prefetch);
  world.first.reset();
  world.holder->let_go();
  CHECK(world.complaint_of(*second) == "");
  CHECK(second->stats().joined == 1);
  CHECK(second->stats().reads == 0);
}

TEST_CASE("a lane that goes first takes over what waits for the next copy") {
  SecondTry world(4);
  const auto second = world.submit(Lane::decode);
  world.holder->let_go();
  CHECK(world.complaint_of(*second) == "");
  CHECK(world.complaint_of(*world.first) == "");
  CHECK(world.first->stats().reads == 1);
  CHECK(second->stats().reads == 2);  // codes and scales of the second copy
}

TEST_CASE("a reader that is being closed still asks the next copy") {
  World world({.backend = "pread", .threads = 1, .depth = 8, .sets = 0, .rounds = 0}, true,
              64 << 20);
  Holder holder(*world.reader, Lane::decode);
  holder.wait();
  const std::int64_t id = 3;  // broken in the first copy
  const LayerKeys keys{.layer = kMended, .ids = &id, .position_stride = 1, .column_stride = 1};
  const auto submit = [&] {
    return world.engine->submit({keys}, {.positions = 1, .columns = {0, 1, 1}});
  };
  const auto batch = submit();
  std::thread closing([&] { world.reader->close(); });
  while (!submit()->wait(1)) continue;  // until it is refused
  holder.let_go();
  closing.join();
  while (!batch->wait(1000)) continue;
  CHECK(!batch->failure());
}

TEST_CASE("the file that failed is named, not another of its copy") {
  const TestTables tables(false);
  const auto reader = std::make_shared<Reader>(tables.paths(), ReaderOptions{.backend = "pread"});
  Table table = tables.tables()[kTwoCopies - 1];
  table.copies[0].planes.scales = table.copies[1].planes.scales;  // of another file
  table.copies[1] = tables.tables()[kTwoCopies - 1].copies[0];
  Engine engine(reader, {table}, kTightBytes, 0);
  CHECK(engine.failed_files().empty());
  const std::string& cut = tables.paths()[1];
  std::filesystem::resize_file(cut, std::filesystem::file_size(cut) - 8);
  const std::int64_t id = TestTables::kRows - 1;
  const LayerKeys keys{.layer = kTwoCopies, .ids = &id, .position_stride = 1, .column_stride = 1};
  const auto batch = engine.submit({keys}, {.positions = 1, .columns = {0, 1, 1}});
  while (!batch->wait(1000)) continue;
  CHECK(!batch->failure());
  CHECK(engine.failed_files() == std::vector<std::uint32_t>{1});
}

}  // namespace
}  // namespace engram::test
