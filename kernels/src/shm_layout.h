// The shared-memory channel to the byte, as docs/shared-memory.md specifies it. Both sides build
// from this file; all numbers are little-endian.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace engram::shm {

static_assert(std::endian::native == std::endian::little);

using Magic = std::array<char, 8>;
using Digest = std::array<std::byte, 32>;
using ServerId = std::array<std::byte, 16>;

inline constexpr Magic kMagic{'\x89', 'E', 'N', 'G', 'S', 'H', 'M', '\n'};
inline constexpr std::uint32_t kVersion = 1;

// Requests of one client under way.
inline constexpr std::uint32_t kSlots = 64;
// A lookup of each slot and its cancellation, twice: a client that keeps the rules never finds the
// ring full, since the server empties it before each answer.
inline constexpr std::uint32_t kRingEntries = 4 * kSlots;

// As gRPC numbers them.
enum class Status : std::uint32_t {
  ok = 0,
  cancelled = 1,
  invalid_argument = 3,
  deadline_exceeded = 4,
  permission_denied = 7,
  resource_exhausted = 8,
  failed_precondition = 9,
  internal = 13,
  unavailable = 14,
  data_loss = 15,
};
inline constexpr std::size_t kStatuses = 16;

// ----------------------------------------------------------------------------------- the socket

struct Hello {
  Magic magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t zero = 0;
  std::uint64_t data_bytes = 0;  // wanted; the server may grant fewer
};
static_assert(sizeof(Hello) == 24);

// With the memory file as SCM_RIGHTS when the status is ok.
struct Welcome {
  Magic magic = kMagic;
  std::uint32_t version = kVersion;
  Status status = Status::ok;
  std::uint64_t file_bytes = 0;
  ServerId server_id{};  // as in Describe
  std::uint32_t message_bytes = 0;
  std::array<char, 468> message{};
};
static_assert(sizeof(Welcome) == 512);

// ------------------------------------------------------------------------------ the memory file

// Page 0. The first line is written by the server before the client sees it; of the rest, each word
// has a cache line of its own.
struct Header {
  Magic magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t slots = kSlots;
  std::uint32_t ring_entries = kRingEntries;
  std::uint32_t zero = 0;
  std::uint64_t data_offset = 0;
  std::uint64_t data_bytes = 0;
  alignas(64) std::uint32_t submitted = 0;     // the client's: entries it has put into the ring
  alignas(64) std::uint32_t doorbell = 0;      // counted up by both; the server sleeps on it
  alignas(64) std::uint32_t server_waits = 0;  // the server's: 1 while it may sleep
};
static_assert(offsetof(Header, submitted) == 64 && offsetof(Header, doorbell) == 128 &&
              offsetof(Header, server_waits) == 192);

enum class Kind : std::uint32_t { tokens = 1, blocks = 2, rows = 3, cancel = 4 };

// What a request is, but for its keys, which lie in the data area.
struct Entry {
  Kind kind{};
  std::uint32_t slot = 0;
  std::uint32_t serial = 0;
  std::uint32_t positions = 0;
  std::uint64_t keys_offset = 0;
  std::uint64_t keys_bytes = 0;
  std::uint64_t out_offset = 0;
  std::uint64_t out_bytes = 0;
  std::uint64_t timeout_ns = 0;  // 0: none
  std::uint32_t sequences = 0;   // tokens
  std::uint32_t history = 0;     // tokens: ids of all sequences' look-back
  std::uint16_t layers = 0;      // tokens: 0 = all
  std::uint16_t pins = 0;
  std::uint16_t column_begin = 0;  // both 0: all columns
  std::uint16_t column_end = 0;
  std::uint8_t format = 0;    // as Format
  std::uint8_t lane = 0;      // 0 = by size, else 1 + Lane
  std::uint8_t id_bytes = 0;  // blocks, rows: 4 or 8
  std::array<std::uint8_t, 53> zero{};
};
static_assert(sizeof(Entry) == 128 && offsetof(Entry, zero) == 75);

// Of keys: a digest the client relies on.
struct Pin {
  std::uint32_t of = 0;  // a layer, kPinTokenMap or kPinHash
  Digest digest{};
};
static_assert(sizeof(Pin) == 36);
inline constexpr std::uint32_t kPinTokenMap = 0xFFFFFFFF;
inline constexpr std::uint32_t kPinHash = 0xFFFFFFFE;

// The answer to the request that holds a slot.
struct Completion {
  std::uint32_t serial = 0;        // the server's, written last: the request it answers
  std::uint32_t client_waits = 0;  // the client's: 1 while it may sleep on `serial`
  Status status = Status::ok;
  std::uint32_t message_bytes = 0;
  std::uint64_t payload_bytes = 0;  // of rows; the mask of tokens comes directly behind them
  // As LookupStats: rows, distinct, cached, joined, reads, read_bytes, groups.
  std::array<std::uint64_t, 7> stats{};
  std::uint32_t row_bytes = 0;
  std::uint32_t retry_after_ms = 0;  // resource_exhausted: when to come back; 0: nobody knows
  std::array<std::uint8_t, 40> zero{};
  std::array<char, 896> message{};
};
static_assert(sizeof(Completion) == 1024 && offsetof(Completion, message) == 128);

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kRingOffset = kPageBytes;
inline constexpr std::size_t kCompletionsOffset = kRingOffset + kRingEntries * sizeof(Entry);
inline constexpr std::size_t kDataOffset = kCompletionsOffset + kSlots * sizeof(Completion);
static_assert(sizeof(Header) <= kPageBytes && kDataOffset % kPageBytes == 0);

// Of the data area. The least holds a position in any format.
inline constexpr std::uint64_t kDataBytesMin = 1 << 20;

}  // namespace engram::shm
