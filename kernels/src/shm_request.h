// From what a client wrote to a request of the server's own: copied once, then checked, with the
// words of engram_server/lookup.py.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine.h"
#include "hash.h"
#include "shm_layout.h"

namespace engram::shm {

struct ServedTable {
  std::int64_t layer = 0;
  std::uint64_t rows = 0;
  RowKind kind = RowKind::fp4;
  Digest digest{};
};

// What requests are answered from. Outlives every client.
struct Served {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Reader> reader;
  std::shared_ptr<const NgramHash> hash{};   // null: no tokenizer, only row ids are looked up
  std::vector<std::int64_t> hash_layers{};   // what its planes are of
  std::vector<ServedTable> tables{};         // ascending by layer
  std::size_t columns = 24;                  // of a layer
  std::size_t group_rows = kGroupRows;       // or 1: rows form no groups
  std::optional<Digest> token_map_digest{};  // none: as hash
  std::optional<Digest> hash_digest{};
  bool sealed = false;  // every row carries a checksum: a file written to needs no further look
};

struct Limits {
  std::uint64_t request_rows = 131'072 * 48;  // of one request
  AdmissionLimits admission{};                // those of gRPC, and counted together with it
  std::uint64_t decode_rows = 128 * 48;  // a request of at most so many is decode unless it says
  std::uint64_t block_bytes = 4 << 20;   // packed rows of a batch: what a decode step may wait for
  std::chrono::nanoseconds budget_wait = std::chrono::seconds(30);
  unsigned clients = 64;
  std::uint64_t client_bytes = 256 << 20;  // of one client's data area
  std::uint64_t bytes = 1 << 30;           // of all memory files
  std::chrono::nanoseconds spin{0};        // before a service thread sleeps
};

// Ends one request with a status and a sentence.
class Refusal : public std::runtime_error {
 public:
  Refusal(Status status, const std::string& sentence)
      : std::runtime_error(sentence), status(status) {}
  Status status;
};

// A request that was checked: every id is -1 or a row of its layer's table. Owns all it points to.
struct Request {
  std::vector<LayerKeys> keys;  // of all positions
  std::size_t positions = 0;
  std::size_t width = 0;  // ids of a position in `keys`
  Columns columns{};
  Format format = Format::packed;
  std::size_t row_bytes = 0;
  std::unique_ptr<bool[]> mask;  // [positions], for tokens
  std::vector<std::byte> body;   // what was copied; ids of 8 bytes stay in it
  std::vector<std::int64_t> ids;

  std::size_t position_bytes() const { return keys.size() * columns.count() * row_bytes; }
  std::size_t payload_bytes() const { return positions * position_bytes(); }
  // Of memory, for its keys.
  std::size_t held_bytes() const {
    return body.size() + ids.size() * sizeof(ids[0]) + (mask ? positions : 0);
  }
};

// Rows an entry asks for by its counts, as Limits::request_rows counts them; the keys may turn out
// to say less. Throws Refusal for an entry that contradicts itself.
std::uint64_t rows_of(const Served& served, const Entry& entry);
// The lane it goes to. Throws Refusal.
Lane lane_of(const Entry& entry, std::uint64_t rows, const Limits& limits);
// Copies the keys out of the client's data area and checks them, and that the answer fits. Throws
// Refusal, std::invalid_argument.
Request read_request(const Served& served, const Entry& entry, std::span<const std::byte> data);

}  // namespace engram::shm
