// Python face of shm_server.h and shm_client.h.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "bind_metrics.h"
#include "bindings.h"
#include "process.h"
#include "shm_client.h"
#include "shm_server.h"

namespace nb = nanobind;

namespace engram {
namespace {

using Clock = std::chrono::steady_clock;

// Between two looks at pending signals (Ctrl-C) while waiting.
constexpr std::chrono::milliseconds kSignalCheck{100};
constexpr double kWaitMaxS = 1e9;

Clock::time_point deadline_of(std::optional<double> timeout_s) {
  if (!timeout_s || !(*timeout_s < kWaitMaxS)) return Clock::time_point::max();
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(std::max(0.0, *timeout_s)));
}

// Calls `attempt(until)`, without the GIL, until it gives something or the deadline has come.
template <typename Attempt>
auto honouring_signals(std::optional<double> timeout_s, Attempt attempt) {
  const Clock::time_point deadline = deadline_of(timeout_s);
  while (true) {
    const Clock::time_point until = std::min(deadline, Clock::now() + kSignalCheck);
    auto result = [&] {
      nb::gil_scoped_release unlocked;
      return attempt(until);
    }();
    if (result || Clock::now() >= deadline) return result;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

template <std::size_t kBytes>
std::array<std::byte, kBytes> bytes_of(const nb::bytes& from, const char* what) {
  std::array<std::byte, kBytes> to{};
  if (from.size() != kBytes) {
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(from.size()) +
                                " bytes, not " + std::to_string(kBytes));
  }
  std::memcpy(to.data(), from.c_str(), kBytes);
  return to;
}

std::optional<shm::Digest> digest_of(const nb::bytes& from) {
  if (from.size() == 0) return std::nullopt;
  return bytes_of<sizeof(shm::Digest)>(from, "a digest");
}

using TableTuple = std::tuple<std::int64_t, std::uint64_t, RowKind, nb::bytes>;

shm::Served make_served(std::shared_ptr<Engine> engine, std::shared_ptr<Reader> reader,
                        std::shared_ptr<NgramHash> hash, std::vector<std::int64_t> layers,
                        const std::vector<TableTuple>& tables, std::size_t columns,
                        std::size_t group_rows, const nb::bytes& token_map_digest,
                        const nb::bytes& hash_digest, bool sealed) {
  shm::Served served{.engine = std::move(engine),
                     .reader = std::move(reader),
                     .hash = std::move(hash),
                     .hash_layers = std::move(layers),
                     .columns = columns,
                     .group_rows = group_rows,
                     .token_map_digest = digest_of(token_map_digest),
                     .hash_digest = digest_of(hash_digest),
                     .sealed = sealed};
  for (const auto& [layer, rows, kind, digest] : tables) {
    served.tables.push_back({.layer = layer,
                             .rows = rows,
                             .kind = kind,
                             .digest = bytes_of<sizeof(shm::Digest)>(digest, "a digest")});
  }
  return served;
}

std::shared_ptr<shm::Server> make_server(
    const shm::Served& served, const nb::bytes& server_id, int listener,
    std::optional<unsigned> group, std::uint64_t request_rows, const AdmissionLimits& admission,
    std::uint64_t decode_rows, std::uint64_t block_bytes, double budget_wait_s, unsigned clients,
    std::uint64_t client_bytes, std::uint64_t total_bytes, std::uint64_t spin_us) {
  shm::Limits limits{.request_rows = request_rows,
                     .admission = admission,
                     .decode_rows = decode_rows,
                     .budget_wait = std::chrono::duration_cast<std::chrono::nanoseconds>(
                         std::chrono::duration<double>(budget_wait_s)),
                     .clients = clients,
                     .client_bytes = client_bytes,
                     .bytes = total_bytes,
                     .spin = std::chrono::microseconds(spin_us)};
  // One block of one client must leave room for others within the engine's budget.
  limits.block_bytes =
      std::min({limits.block_bytes, block_bytes, served.engine->budget_bytes() / 8});
  return make_for_this_process<shm::Server>(served, limits,
                                            bytes_of<sizeof(shm::ServerId)>(server_id, "an id"),
                                            UniqueFd(listener), group);
}

nb::dict counts_of(const shm::Server& server) {
  const shm::Server::Counts counts = server.counts();
  nb::dict to;
  to["clients"] = counts.clients;
  to["bytes"] = counts.bytes;
  to["requests"] = counts.requests;
  to["strangers"] = counts.strangers;
  return to;
}

// Requests that were not answered with rows, by status.
nb::dict failures_of(const shm::Server& server) {
  const shm::Server::Counts counts = server.counts();
  nb::dict to;
  for (std::size_t status = 0; status < counts.failures.size(); ++status) {
    if (counts.failures[status] != 0) to[nb::int_(status)] = counts.failures[status];
  }
  return to;
}

// (lane, format, counts, sum in ns) of all that were.
nb::list latencies_of(const shm::Server& server) {
  nb::list all;
  for (const Lane lane : kAllLanes) {
    for (const Format format : kAllFormats) {
      const Histogram& from = server.lookups().answered(lane, format);
      if (!is_empty(from)) all.append(nb::make_tuple(lane, format) + histogram(from));
    }
  }
  return all;
}

// Requests since the last call, in the order they were taken up, and how many are missing.
nb::tuple take_requests(shm::Server& server) {
  shm::Tap::Taken taken = server.tap().take();
  nb::list noted;
  for (shm::Tap::Noted& one : taken.noted) noted.append(nb::cast(std::move(one)));
  return nb::make_tuple(noted, taken.missing);
}

// As engram_server/lookup.py has it.
const char* name_of(shm::Kind kind) {
  if (kind == shm::Kind::tokens) return "tokens";
  return kind == shm::Kind::blocks ? "blocks" : "rows";
}

// (tokens, look-back) of each sequence, int32 little-endian. The keys were checked.
nb::list sequences_of(const shm::Tap::Noted& noted) {
  nb::list all;
  if (noted.entry.kind != shm::Kind::tokens) return all;
  const auto* tokens = reinterpret_cast<const std::int32_t*>(noted.request->body.data());
  const std::int32_t* history = tokens + noted.entry.positions;
  const auto* lengths = reinterpret_cast<const std::uint32_t*>(history + noted.entry.history);
  const std::uint32_t* look_backs = lengths + noted.entry.sequences;
  for (std::uint32_t i = 0; i < noted.entry.sequences; ++i) {
    all.append(nb::make_tuple(nb::bytes(tokens, lengths[i] * sizeof *tokens),
                              nb::bytes(history, look_backs[i] * sizeof *history)));
    tokens += lengths[i];
    history += look_backs[i];
  }
  return all;
}

using Ids = nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<2>>;

// (layer, row ids [positions, columns or 1]) of each layer; views of what was noted.
nb::list ids_of(nb::handle_t<shm::Tap::Noted> self) {
  const shm::Request& request = *nb::cast<const shm::Tap::Noted&>(self).request;
  nb::list all;
  for (const LayerKeys& keys : request.keys) {
    const Ids ids(keys.ids, {request.positions, request.width}, self,
                  {keys.position_stride, keys.column_stride});
    all.append(nb::make_tuple(keys.layer, ids));
  }
  return all;
}

// A contiguous object's bytes, for as long as this lives.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

template <typename To>
To narrow(std::uint64_t value, const char* what) {
  if (value > std::numeric_limits<To>::max()) {
    throw std::invalid_argument(std::to_string(value) + " " + what +
                                " are more than one request of the shared-memory channel can have");
  }
  return static_cast<To>(value);
}

std::shared_ptr<shm::Ticket> submit(shm::Client& client, unsigned kind, const nb::list& keys,
                                    std::uint64_t positions, std::uint64_t sequences,
                                    std::uint64_t history, std::uint64_t layers, std::uint64_t pins,
                                    std::uint64_t column_begin, std::uint64_t column_end,
                                    Format format, unsigned lane, unsigned id_bytes,
                                    std::uint64_t timeout_ns, std::uint64_t payload_bytes,
                                    std::uint64_t mask_bytes, std::optional<double> wait_s) {
  std::vector<std::unique_ptr<Buffer>> buffers;
  shm::Call call{.entry = {.kind = static_cast<shm::Kind>(kind),
                           .positions = narrow<std::uint32_t>(positions, "positions"),
                           .timeout_ns = timeout_ns,
                           .sequences = narrow<std::uint32_t>(sequences, "sequences"),
                           .history = narrow<std::uint32_t>(history, "ids of look-back"),
                           .layers = narrow<std::uint16_t>(layers, "layers"),
                           .pins = narrow<std::uint16_t>(pins, "pins"),
                           .column_begin = narrow<std::uint16_t>(column_begin, "columns"),
                           .column_end = narrow<std::uint16_t>(column_end, "columns"),
                           .format = static_cast<std::uint8_t>(format),
                           .lane = narrow<std::uint8_t>(lane, "lanes"),
                           .id_bytes = narrow<std::uint8_t>(id_bytes, "bytes of an id")},
                 .payload_bytes = payload_bytes,
                 .mask_bytes = mask_bytes};
  for (const nb::handle part : keys) {
    buffers.push_back(std::make_unique<Buffer>(part));
    call.keys.push_back(buffers.back()->bytes());
  }
  return honouring_signals(wait_s,
                           [&](Clock::time_point until) { return client.submit(call, until); });
}

using View = nb::ndarray<nb::numpy, std::uint8_t>;

// An array of a ticket's memory, which keeps the ticket.
View view_of(std::span<std::byte> bytes, nb::handle owner) {
  return View(bytes.data(), {bytes.size()}, owner);
}

nb::tuple answer_of(const shm::Ticket& ticket) {
  const shm::Completion& answer = ticket.answer();
  const auto& s = answer.stats;
  const std::string message = ticket.message();
  // Paths in it may be no UTF-8, and its end may be cut off anywhere.
  const nb::object text = nb::steal(
      PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "replace"));
  if (!text.is_valid()) throw nb::python_error();
  return nb::make_tuple(static_cast<std::uint32_t>(answer.status), text, answer.payload_bytes,
                        answer.row_bytes, nb::make_tuple(s[0], s[1], s[2], s[3], s[4], s[5], s[6]),
                        answer.retry_after_ms);
}

void bind_server(nb::module_& m) {
  nb::class_<shm::Served>(m, "ShmServed")
      .def(nb::new_(&make_served), nb::kw_only(), nb::arg("engine"), nb::arg("reader"),
           nb::arg("hash").none(), nb::arg("layers"), nb::arg("tables"), nb::arg("columns"),
           nb::arg("group_rows"), nb::arg("token_map_digest"), nb::arg("hash_digest"),
           nb::arg("sealed"));

  nb::class_<shm::Server>(m, "ShmServer")
      .def(nb::new_(&make_server), nb::arg("served"), nb::kw_only(), nb::arg("server_id"),
           nb::arg("listener"), nb::arg("group").none(), nb::arg("request_rows"),
           nb::arg("admission"), nb::arg("decode_rows"), nb::arg("block_bytes"),
           nb::arg("budget_wait_s"), nb::arg("clients"), nb::arg("client_bytes"),
           nb::arg("total_bytes"), nb::arg("spin_us"))
      .def("reopen", &shm::Server::reopen, nb::arg("served"))
      .def_prop_ro("settled", &shm::Server::settled)
      .def("drain", &shm::Server::drain, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("idle", &shm::Server::idle)
      .def("close", &shm::Server::close, nb::call_guard<nb::gil_scoped_release>())
      .def("counts", &counts_of)
      .def("failures", &failures_of)
      .def("latencies", &latencies_of)
      .def_prop_ro("damage", &shm::Server::damage)
      .def("take_notes", &shm::Server::take_notes)
      .def(
          "note_requests",
          [](shm::Server& server, std::uint64_t bytes) { server.tap().allow(bytes); },
          nb::arg("bytes"))
      .def("take_requests", &take_requests);

  using Noted = shm::Tap::Noted;
  nb::class_<Noted>(m, "ShmRequest")
      .def_ro("at_ns", &Noted::at_ns)
      .def_ro("lane", &Noted::lane)
      .def_prop_ro("kind", [](const Noted& noted) { return name_of(noted.entry.kind); })
      .def_prop_ro("format", [](const Noted& noted) { return noted.request->format; })
      .def_prop_ro("columns",
                   [](const Noted& noted) {
                     const Columns& columns = noted.request->columns;
                     return nb::make_tuple(columns.begin, columns.end);
                   })
      .def_prop_ro("names_layers", [](const Noted& noted) { return noted.entry.layers != 0; })
      .def_prop_ro("sequences", &sequences_of)
      .def_prop_ro("ids", &ids_of);
}

void bind_client(nb::module_& m) {
  nb::exception<shm::Lost>(m, "ShmLostError");
  nb::exception<shm::NotWelcome>(m, "ShmRefusedError");

  nb::class_<shm::Ticket>(m, "ShmTicket")
      .def(
          "wait",
          [](shm::Ticket& ticket, std::optional<double> timeout_s, std::uint64_t spin_us) {
            std::chrono::microseconds spin(spin_us);
            return honouring_signals(timeout_s, [&](Clock::time_point until) {
              return ticket.wait(until, std::exchange(spin, {}));
            });
          },
          nb::arg("timeout_s") = nb::none(), nb::arg("spin_us") = 0)
      .def_prop_ro("answer", &answer_of)
      .def_prop_ro("rows",
                   [](nb::handle_t<shm::Ticket> self) {
                     return view_of(nb::cast<shm::Ticket&>(self).rows(), self);
                   })
      .def_prop_ro("mask",
                   [](nb::handle_t<shm::Ticket> self) {
                     return view_of(nb::cast<shm::Ticket&>(self).mask(), self);
                   })
      .def("release", &shm::Ticket::release);

  nb::class_<shm::Client>(m, "ShmClient")
      .def(nb::new_([](const std::string& path, std::uint64_t data_bytes, double timeout_s) {
             nb::gil_scoped_release unlocked;
             const std::chrono::duration<double> at_most(std::clamp(timeout_s, 0.0, 1e6));
             return shm::Client::attach(path, data_bytes,
                                        std::chrono::ceil<std::chrono::milliseconds>(at_most));
           }),
           nb::arg("path"), nb::arg("data_bytes"), nb::arg("timeout_s"))
      .def_prop_ro("server_id",
                   [](const shm::Client& client) {
                     return nb::bytes(client.server_id().data(), client.server_id().size());
                   })
      .def_prop_ro("alive", &shm::Client::alive)
      .def_prop_ro("data",
                   [](nb::handle_t<shm::Client> self) {
                     return view_of(nb::cast<shm::Client&>(self).data(), self);
                   })
      .def("submit", &submit, nb::kw_only(), nb::arg("kind"), nb::arg("keys"), nb::arg("positions"),
           nb::arg("sequences") = 0, nb::arg("history") = 0, nb::arg("layers") = 0,
           nb::arg("pins") = 0, nb::arg("column_begin") = 0, nb::arg("column_end") = 0,
           nb::arg("format"), nb::arg("lane") = 0, nb::arg("id_bytes") = 0,
           nb::arg("timeout_ns") = 0, nb::arg("payload_bytes"), nb::arg("mask_bytes") = 0,
           nb::arg("wait_s") = nb::none())
      .def("close", &shm::Client::close);
}

}  // namespace

void bind_shm(nb::module_& m) {
  bind_server(m);
  bind_client(m);
  m.attr("SHM_VERSION") = shm::kVersion;
  m.attr("SHM_SLOTS") = shm::kSlots;
}

}  // namespace engram
