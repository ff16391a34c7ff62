// Python face of engine.h.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>

#include "arrays.h"
#include "bindings.h"
#include "engine.h"
#include "process.h"

namespace nb = nanobind;

namespace engram {
namespace {

// Between two looks at pending signals (Ctrl-C) while waiting.
constexpr std::int64_t kSignalCheckMs = 100;
constexpr double kDeadlineMaxS = 1e9;

using Ids = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::device::cpu>;

using ColumnRange = std::optional<std::pair<std::size_t, std::size_t>>;

Columns columns_of(std::size_t width, std::size_t group, const ColumnRange& range) {
  const auto [begin, end] = range.value_or(std::pair{std::size_t{0}, width});
  if ((group != 1 && group != kGroupRows) || width % group != 0) {
    throw std::invalid_argument("groups of " + std::to_string(group) + " columns in " +
                                std::to_string(width) + ": expected 1, or " +
                                std::to_string(kGroupRows) + " and a multiple of it");
  }
  if (begin > end || end > width) {
    throw std::invalid_argument("columns " + std::to_string(begin) + " to " + std::to_string(end) +
                                " of " + std::to_string(width));
  }
  return {.begin = begin, .end = end, .group_rows = group};
}

nb::tuple stats_tuple(const BatchStats& s) {
  return nb::make_tuple(s.rows, s.distinct, s.cached, s.joined, s.reads, s.read_bytes, s.groups);
}

using Keys = std::vector<std::pair<std::int64_t, Ids>>;

std::vector<LayerKeys> layer_keys(const Keys& keys) {
  std::vector<LayerKeys> layers;
  for (const auto& [layer, ids] : keys) {
    if (ids.shape(0) != keys.front().second.shape(0) ||
        ids.shape(1) != keys.front().second.shape(1)) {
      throw std::invalid_argument("every layer's ids must have the same shape");
    }
    layers.push_back({.layer = layer,
                      .ids = ids.data(),
                      .position_stride = ids.stride(0),
                      .column_stride = ids.stride(1)});
  }
  return layers;
}

Order order_of(const Keys& keys, std::size_t group, const ColumnRange& columns) {
  return {.positions = keys.empty() ? 0 : keys.front().second.shape(0),
          .columns = columns_of(keys.empty() ? 0 : keys.front().second.shape(1), group, columns)};
}

std::shared_ptr<Batch> submit(Engine& engine, const Keys& keys, bool notify, std::size_t group,
                              const ColumnRange& columns, Lane lane,
                              std::optional<double> deadline_s,
                              std::shared_ptr<Admission> admission) {
  const std::vector<LayerKeys> layers = layer_keys(keys);
  Order order = order_of(keys, group, columns);
  order.lane = lane;
  order.notify = notify;
  order.admission = std::move(admission);
  // What is further away than the clock can hold is no deadline.
  if (deadline_s && *deadline_s < kDeadlineMaxS) order.deadline_s = std::max(0.0, *deadline_s);
  nb::gil_scoped_release unlocked;
  return engine.submit(layers, order);
}

using Out = nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu>;

void check_out(const Out& out, std::size_t bytes) {
  if (out.size() == bytes) return;
  throw std::invalid_argument("out has " + std::to_string(out.size()) + " bytes; these rows need " +
                              std::to_string(bytes));
}

nb::object copy_hits(Engine& engine, const Keys& keys, Format format, const Out& out,
                     std::size_t group, const ColumnRange& columns, Lane lane,
                     std::shared_ptr<Admission> admission) {
  const std::vector<LayerKeys> layers = layer_keys(keys);
  Order order = order_of(keys, group, columns);
  order.lane = lane;
  order.admission = std::move(admission);
  check_out(out, engine.gathered_bytes(layers, order, format));
  std::optional<BatchStats> stats;
  {
    nb::gil_scoped_release unlocked;
    stats = engine.copy_hits(layers, order, format, reinterpret_cast<std::byte*>(out.data()));
  }
  if (!stats) return nb::none();
  return stats_tuple(*stats);
}

bool wait(Batch& batch, std::optional<double> timeout_s) {
  using Clock = std::chrono::steady_clock;
  const bool forever = !timeout_s || *timeout_s > kDeadlineMaxS;
  // Times that are past, or not a number, count as now: the clock could not hold some of them.
  const double seconds = forever ? 0.0 : std::max(0.0, *timeout_s);
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(seconds));
  while (true) {
    std::int64_t slice_ms = kSignalCheckMs;
    if (!forever) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
      slice_ms = std::clamp<std::int64_t>(left.count(), 0, kSignalCheckMs);
    }
    {
      nb::gil_scoped_release unlocked;
      if (batch.wait(slice_ms)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!forever && Clock::now() >= until) return batch.done();
  }
}

// bytes that `fill` writes, without the GIL.
template <typename Fill>
nb::bytes filled_bytes(std::size_t bytes, Fill fill) {
  nb::object result =
      nb::steal<nb::object>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  if (!result.is_valid()) throw nb::python_error();
  auto* const out = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result.ptr()));
  {
    nb::gil_scoped_release unlocked;
    fill(out);
  }
  return nb::borrow<nb::bytes>(result);
}

nb::bytes gather(const Batch& batch, std::size_t first, std::size_t count, Format format) {
  return filled_bytes(batch.gathered_bytes(first, count, format),
                      [&](std::byte* out) { batch.gather(first, count, format, out); });
}

nb::bytes pick(const Batch& batch, std::size_t layer, const InputArray<std::int64_t, 1>& picks,
               Format format) {
  return filled_bytes(picks.size() * batch.row_bytes(layer, format),
                      [&](std::byte* out) { batch.pick(layer, as_span(picks), format, out); });
}

void gather_into(const Batch& batch, std::size_t first, std::size_t count, Format format,
                 const Out& out) {
  check_out(out, batch.gathered_bytes(first, count, format));
  nb::gil_scoped_release unlocked;
  batch.gather(first, count, format, reinterpret_cast<std::byte*>(out.data()));
}

nb::tuple stats(const Batch& batch) {
  if (!batch.done()) throw std::logic_error("the batch is still being read");
  return stats_tuple(batch.stats());
}

nb::dict cache_stats(const Engine& engine) {
  nb::dict to;
  RowCache* const cache = engine.cache();
  if (cache == nullptr) return to;
  const CacheCounters& from = cache->counters();
  to["capacity_bytes"] = cache->capacity_bytes();
  to["slot_bytes"] = cache->capacity_bytes() / cache->slots();
  to["slots"] = cache->slots();
  to["used"] = from.used.load();
  to["hits"] = from.hits.load();
  to["misses"] = from.misses.load();
  to["joined"] = from.joined.load();
  to["overflows"] = from.overflows.load();
  to["evictions"] = from.evictions.load();
  to["ready_bytes"] = from.ready_bytes.load();
  return to;
}

auto cached_groups(const Engine& engine, std::int64_t layer) {
  std::vector<RowCache::Held> held;
  {
    nb::gil_scoped_release unlocked;
    const std::uint16_t number = engine.tables().number_of(layer);
    if (engine.cache() != nullptr) held = engine.cache()->held(number);
  }
  OutputArray<std::uint8_t> rows(held.size());
  OutputArray<std::int64_t> ids(held.size() * kGroupRows);
  OutputArray<std::uint8_t> masks(held.size());
  OutputArray<std::uint8_t> heats(held.size());
  for (std::size_t i = 0; i < held.size(); ++i) {
    rows.data()[i] = static_cast<std::uint8_t>(held[i].group.rows);
    std::ranges::copy(held[i].group.ids, ids.data() + i * kGroupRows);
    masks.data()[i] = held[i].valid;
    heats.data()[i] = held[i].heat;
  }
  return nb::make_tuple(rows.release({held.size()}), ids.release({held.size(), kGroupRows}),
                        masks.release({held.size()}), heats.release({held.size()}));
}

nb::tuple progress_tuple(const LoadProgress& progress) {
  return nb::make_tuple(progress.loaded, progress.rows, progress.error);
}

// An exception class with facts as attributes, which `tell` sets.
template <typename Error, void (*tell)(const Error&, nb::object&)>
void bind_error(nb::module_& m, const char* name) {
  const std::string full = std::string("engram_kernels._core.") + name;
  const nb::object type = nb::steal<nb::object>(PyErr_NewException(full.c_str(), nullptr, nullptr));
  m.attr(name) = type;
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* type_ptr) {
        try {
          std::rethrow_exception(thrown);
        } catch (const Error& error) {
          const nb::handle error_type(static_cast<PyObject*>(type_ptr));
          nb::object instance = error_type(nb::str(error.what()));
          tell(error, instance);
          PyErr_SetObject(error_type.ptr(), instance.ptr());
        }
      },
      type.ptr());
}

void tell_row(const RowError& error, nb::object& instance) {
  instance.attr("layer") = error.failure.layer;
  instance.attr("row") = error.failure.row;
  instance.attr("error") = error.failure.error;
}

void tell_overload(const Overloaded& error, nb::object& instance) {
  instance.attr("limit") = error.limit;
  instance.attr("retry_after_s") = error.retry_after_s;
}

nb::dict overloads(const Engine& engine) {
  nb::dict counts;
  for (std::size_t i = 0; i < kOverloadNames.size(); ++i) {
    counts[kOverloadNames[i]] = engine.admissions().refused(static_cast<OverloadLimit>(i));
  }
  return counts;
}

void bind_admission(nb::module_& m) {
  nb::enum_<OverloadLimit>(m, "OverloadLimit")
      .value("ROWS", OverloadLimit::rows)
      .value("QUEUE", OverloadLimit::queue)
      .value("DEADLINE", OverloadLimit::deadline)
      .value("CLIENT_ROWS", OverloadLimit::client_rows)
      .value("CLIENT_RATE", OverloadLimit::client_rate)
      .value("BUDGET", OverloadLimit::budget);

  nb::class_<AdmissionLimits>(m, "AdmissionLimits")
      .def(
          "__init__",
          [](AdmissionLimits* self, std::uint64_t rows, double queue_s, std::uint64_t client_rows,
             double client_rows_per_s) {
            new (self) AdmissionLimits{.rows = rows,
                                       .queue_s = queue_s,
                                       .client_rows = client_rows,
                                       .client_rows_per_s = client_rows_per_s};
          },
          nb::kw_only(), nb::arg("rows"), nb::arg("queue_s"), nb::arg("client_rows") = 0,
          nb::arg("client_rows_per_s") = 0.0);

  nb::class_<Quota>(m, "Quota").def(nb::init<>());

  nb::class_<Admission>(m, "Admission").def("release", &Admission::release);
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_error<Overloaded, tell_overload>(m, "OverloadedError");
  bind_error<RowError, tell_row>(m, "RowError");
  bind_admission(m);

  nb::class_<Plane>(m, "Plane")
      .def(
          "__init__",
          [](Plane* self, std::uint32_t file, std::uint64_t offset, std::uint64_t stride) {
            new (self) Plane{.file = file, .offset = offset, .stride = stride};
          },
          nb::arg("file"), nb::arg("offset"), nb::arg("stride"));

  nb::class_<Planes>(m, "Planes")
      .def(
          "__init__",
          [](Planes* self, const Plane& codes, const Plane& scales) {
            new (self) Planes{.codes = codes, .scales = scales};
          },
          nb::arg("codes"), nb::arg("scales"));

  nb::class_<Pages>(m, "Pages")
      .def(
          "__init__",
          [](Pages* self, std::uint32_t file, std::uint64_t offset, const nb::bytes& uuid) {
            Pages pages{.file = file, .offset = offset};
            if (uuid.size() != pages.uuid.size()) {
              throw std::invalid_argument("a store's UUID has 16 bytes, not " +
                                          std::to_string(uuid.size()));
            }
            std::memcpy(pages.uuid.data(), uuid.c_str(), pages.uuid.size());
            new (self) Pages(pages);
          },
          nb::arg("file"), nb::arg("offset"), nb::arg("uuid"));

  nb::class_<Table>(m, "Table")
      .def(
          "__init__",
          [](Table* self, std::int64_t layer, std::uint64_t rows, RowKind kind,
             const std::vector<std::variant<Planes, Pages>>& copies) {
            Table table{.layer = layer, .rows = rows, .kind = kind};
            for (const auto& copy : copies) {
              const Pages* const pages = std::get_if<Pages>(&copy);
              table.copies.push_back(pages != nullptr
                                         ? TableCopy{.pages = *pages}
                                         : TableCopy{.planes = std::get<Planes>(copy)});
            }
            new (self) Table(std::move(table));
          },
          nb::arg("layer"), nb::arg("rows"), nb::arg("kind"), nb::arg("copies"));

  nb::enum_<Lane>(m, "Lane")
      .value("DECODE", Lane::decode)
      .value("PREFILL", Lane::prefill)
      .value("PREFETCH", Lane::prefetch);

  nb::class_<Batch>(m, "Batch")
      .def_prop_ro("tag", &Batch::tag)
      .def_prop_ro("done", &Batch::done)
      .def_prop_ro("stats", &stats)
      .def("wait", &wait, nb::arg("timeout_s") = nb::none())
      .def("check", &Batch::check)
      .def("gather", &gather, nb::arg("first"), nb::arg("count"), nb::arg("format"))
      .def("gather_into", &gather_into, nb::arg("first"), nb::arg("count"), nb::arg("format"),
           nb::arg("out").noconvert())
      .def("pick", &pick, nb::arg("layer"), nb::arg("picks").noconvert(), nb::arg("format"));

  nb::class_<Engine>(m, "Engine")
      .def(nb::new_([](std::shared_ptr<Reader> reader, std::vector<Table> tables,
                       std::uint64_t budget_bytes, std::uint64_t cache_bytes) {
             return make_for_this_process<Engine>(std::move(reader), std::move(tables),
                                                  budget_bytes, cache_bytes);
           }),
           nb::arg("reader"), nb::arg("tables"), nb::arg("budget_bytes") = std::uint64_t{1} << 30,
           nb::kw_only(), nb::arg("cache_bytes") = std::uint64_t{0})
      .def(
          "admit",
          [](const Engine& engine, std::uint64_t rows, Lane lane, const AdmissionLimits& limits,
             std::optional<double> left_s, std::shared_ptr<Quota> client) {
            return engine.admissions().admit(rows, lane, limits, left_s, std::move(client),
                                             now_ns());
          },
          nb::arg("rows"), nb::arg("lane"), nb::arg("limits"), nb::kw_only(),
          nb::arg("left_s") = nb::none(), nb::arg("client") = nb::none())
      .def(
          "count_overload",
          [](const Engine& engine, OverloadLimit limit) { engine.admissions().count(limit); },
          nb::arg("limit"))
      .def("overloads", &overloads)
      .def_prop_ro("admitted_rows", [](const Engine& engine) { return engine.admissions().rows(); })
      .def(
          "wait_s",
          [](const Engine& engine, Lane lane) {
            return engine.admissions().wait_s(lane, now_ns());
          },
          nb::arg("lane"))
      .def_prop_ro("event_fd", &Engine::event_fd)
      .def("completions", &Engine::take_completions)
      .def("submit", &submit, nb::arg("keys").noconvert(), nb::arg("notify") = false, nb::kw_only(),
           nb::arg("group") = 1, nb::arg("columns") = nb::none(), nb::arg("lane") = Lane::decode,
           nb::arg("deadline_s") = nb::none(), nb::arg("admission") = nb::none())
      .def("copy_hits", &copy_hits, nb::arg("keys").noconvert(), nb::arg("format"),
           nb::arg("out").noconvert(), nb::kw_only(), nb::arg("group") = 1,
           nb::arg("columns") = nb::none(), nb::arg("lane") = Lane::decode,
           nb::arg("admission") = nb::none())
      .def("populate_cache", &Engine::populate_cache)
      .def("load_scales", &Engine::load_scales, nb::arg("layer"))
      .def("load_resident", &Engine::load_resident, nb::arg("layer"))
      .def(
          "scale_progress",
          [](const Engine& engine, std::int64_t layer) {
            return progress_tuple(engine.scale_progress(layer));
          },
          nb::arg("layer"))
      .def(
          "resident_progress",
          [](const Engine& engine, std::int64_t layer) {
            return progress_tuple(engine.resident_progress(layer));
          },
          nb::arg("layer"))
      .def("cache_stats", &cache_stats)
      .def("cached_groups", &cached_groups, nb::arg("layer"))
      .def("in_flight_bytes", &Engine::in_flight_bytes)
      .def(
          "totals",
          [](const Engine& engine, Lane lane) { return stats_tuple(engine.totals(lane)); },
          nb::arg("lane"))
      .def(
          "converted",
          [](const Engine& engine, Format format) {
            const ConvertMetrics::Total total = engine.converted().total(format);
            return std::pair(total.ns, total.bytes);
          },
          nb::arg("format"))
      .def_prop_ro("checksum_errors", &Engine::checksum_errors)
      .def_prop_ro("failed_files", &Engine::failed_files)
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace engram
