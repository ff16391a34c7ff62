// A server of shared memory over test tables, and what its clients must be answered.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "shm_client.h"
#include "shm_server.h"
#include "test_tables.h"

namespace engram::test {

using Clock = std::chrono::steady_clock;

inline constexpr std::size_t kColumns = 24;
inline constexpr shm::ServerId kServerId{std::byte{4}, std::byte{2}};

inline Clock::time_point soon(int seconds = 60) {
  return Clock::now() + std::chrono::seconds(seconds);
}

inline UniqueFd listener(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(socket.get(), 16) != 0) {
    throw std::runtime_error("cannot listen at " + path);
  }
  return socket;
}

// Layers as tests/test_tables.h has them: FP4, but for 2, which is FP8. Token ids are classes of
// their own; the columns of each layer have 125 rows.
inline std::shared_ptr<const NgramHash> small_hash() {
  std::vector<std::int32_t> map(100);
  for (std::size_t id = 0; id < map.size(); ++id) map[id] = static_cast<std::int32_t>(id);
  std::vector<std::uint64_t> multipliers;
  std::vector<std::uint64_t> primes;
  std::vector<std::uint64_t> offsets;
  for (std::uint64_t layer = 0; layer < kTestLayers; ++layer) {
    for (std::uint64_t i = 0; i < 4; ++i)
      multipliers.push_back(mixed(layer * 4 + i) % 1'000'003 | 1);
    for (std::uint64_t column = 0; column < kColumns; ++column) {
      primes.push_back(125);
      offsets.push_back(125 * column);
    }
  }
  return std::make_shared<const NgramHash>(map, 2, 9, kTestLayers, multipliers, primes, offsets);
}

inline shm::Digest digest_of(std::int64_t layer) {
  shm::Digest digest{};
  digest.fill(static_cast<std::byte>(layer));
  return digest;
}

class ShmWorld {
 public:
  explicit ShmWorld(bool with_faults, const shm::Limits& limits = {},
                    std::uint64_t budget_bytes = 64 << 20, std::uint64_t cache_bytes = 1 << 20)
      : tables(with_faults),
        path(directory_.path("socket")),
        reader(std::make_shared<Reader>(tables.paths(), ReaderOptions{.backend = "pread"})),
        engine(std::make_shared<Engine>(reader, tables.tables(), budget_bytes, cache_bytes)) {
    tables.truncate();
    server = std::make_unique<shm::Server>(served(engine, reader), limits, kServerId,
                                           listener(path), std::nullopt);
  }

  shm::Served served(std::shared_ptr<Engine> with, std::shared_ptr<Reader> from) const {
    // A file of these tables is cut on purpose: what the reader says of it is not the point here.
    shm::Served served{
        .engine = std::move(with), .reader = std::move(from), .hash = small_hash(), .sealed = true};
    for (const Table& table : tables.tables()) {
      served.hash_layers.push_back(table.layer);
      served.tables.push_back({.layer = table.layer,
                               .rows = table.rows,
                               .kind = table.kind,
                               .digest = digest_of(table.layer)});
    }
    return served;
  }

  std::shared_ptr<shm::Client> attach(std::uint64_t data_bytes = 1 << 20) const {
    return shm::Client::attach(path, data_bytes, std::chrono::seconds(30));
  }

  const TestTables tables;

 private:
  TemporaryDirectory directory_;

 public:
  const std::string path;
  std::shared_ptr<Reader> reader;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<shm::Server> server;
};

// Row ids of one layer.
struct RowsAsked {
  std::int64_t layer = kTwoCopies;
  std::vector<std::int64_t> ids;

  shm::Call call() const {
    layer_word = static_cast<std::uint32_t>(layer);
    return {.entry = {.kind = shm::Kind::rows,
                      .positions = static_cast<std::uint32_t>(ids.size()),
                      .layers = 1,
                      .id_bytes = 8},
            .keys = {std::as_bytes(std::span(ids)), std::as_bytes(std::span(&layer_word, 1))},
            .payload_bytes = ids.size() * packed_bytes(TestTables::kind_of(layer))};
  }
  std::vector<std::byte> expected() const {
    std::vector<std::byte> bytes;
    for (const std::int64_t id : ids) {
      const RowKind kind = TestTables::kind_of(layer);
      const auto row = id < 0 ? std::vector<std::byte>(packed_bytes(kind))
                              : formula_row(layer, static_cast<std::uint64_t>(id), kind);
      bytes.insert(bytes.end(), row.begin(), row.end());
    }
    return bytes;
  }
  mutable std::uint32_t layer_word = 0;
};

inline bool same(std::span<const std::byte> a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), b.size()) == 0;
}

inline RowsAsked draw_rows(Random& random, std::int64_t layer, std::size_t count) {
  RowsAsked asked{.layer = layer, .ids = {}};
  for (std::size_t i = 0; i < count; ++i) {
    asked.ids.push_back(draw<std::int64_t>(random, -1, TestTables::kRows - 1));
  }
  return asked;
}

// The first thing that is wrong with the answer; empty: nothing.
inline std::string complaint(shm::Client& client, const RowsAsked& asked) {
  const auto ticket = client.submit(asked.call(), soon());
  if (ticket == nullptr) return "no room";
  if (!ticket->wait(soon(), std::chrono::nanoseconds(0))) return "no answer";
  if (ticket->status() != shm::Status::ok) return ticket->message();
  if (ticket->answer().stats[0] != asked.ids.size()) return "another number of rows";
  return same(ticket->rows(), asked.expected()) ? "" : "rows are not the table's";
}

template <typename Condition>
bool until(Condition condition, int seconds = 30) {
  const Clock::time_point end = soon(seconds);
  while (!condition()) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace engram::test
