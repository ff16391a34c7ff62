// Python face of engine.h.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>

#include "bindings.h"
#include "engine.h"
#include "process.h"

namespace nb = nanobind;

namespace engram {
namespace {

// Between two looks at pending signals (Ctrl-C) while waiting.
constexpr std::int64_t kSignalCheckMs = 100;

using Ids = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::device::cpu>;

using Columns = std::optional<std::pair<std::size_t, std::size_t>>;

std::shared_ptr<Batch> submit(Engine& engine, const std::vector<std::pair<std::int64_t, Ids>>& keys,
                              bool notify, [[maybe_unused]] std::size_t group,
                              const Columns& columns, [[maybe_unused]] Lane lane,
                              [[maybe_unused]] std::optional<double> deadline_s) {
  std::vector<LayerKeys> layers;
  for (const auto& [layer, ids] : keys) {
    if (ids.shape(0) != keys.front().second.shape(0) ||
        ids.shape(1) != keys.front().second.shape(1)) {
      throw std::invalid_argument("every layer's ids must have the same shape");
    }
    layers.push_back({.layer = layer,
                      .ids = ids.data() + (columns ? columns->first * ids.stride(1) : 0),
                      .position_stride = ids.stride(0),
                      .column_stride = ids.stride(1)});
  }
  const std::size_t positions = keys.empty() ? 0 : keys.front().second.shape(0);
  const std::size_t whole = keys.empty() ? 0 : keys.front().second.shape(1);
  const std::size_t width = columns ? columns->second - columns->first : whole;
  nb::gil_scoped_release unlocked;
  return engine.submit(layers, positions, width, notify);
}

bool wait(Batch& batch, std::optional<double> timeout_s) {
  using Clock = std::chrono::steady_clock;
  const bool forever = !timeout_s || *timeout_s > 1e9;
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

nb::bytes gather(const Batch& batch, std::size_t first, std::size_t count, Format format) {
  const std::size_t bytes = batch.gathered_bytes(first, count, format);
  nb::object result =
      nb::steal<nb::object>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  if (!result.is_valid()) throw nb::python_error();
  auto* const out = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result.ptr()));
  {
    nb::gil_scoped_release unlocked;
    batch.gather(first, count, format, out);
  }
  return nb::borrow<nb::bytes>(result);
}

using Out = nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu>;

void gather_into(const Batch& batch, std::size_t first, std::size_t count, Format format,
                 const Out& out) {
  const std::size_t bytes = batch.gathered_bytes(first, count, format);
  if (out.size() != bytes) {
    throw std::invalid_argument("out has " + std::to_string(out.size()) +
                                " bytes; these rows need " + std::to_string(bytes));
  }
  nb::gil_scoped_release unlocked;
  batch.gather(first, count, format, reinterpret_cast<std::byte*>(out.data()));
}

using Picks = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::bytes pick(const Batch& batch, std::size_t layer, const Picks& picks, Format format) {
  const std::size_t row = batch.gathered_bytes(0, 1, format) / batch.layers() / batch.width();
  const std::size_t bytes = picks.size() * row;
  nb::object result =
      nb::steal<nb::object>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
  auto* out = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result.ptr()));
  std::vector<std::byte> one(batch.gathered_bytes(0, 1, format));
  for (std::size_t i = 0; i < picks.size(); ++i, out += row) {
    const auto at = static_cast<std::size_t>(picks.data()[i]);
    batch.gather(at / batch.width(), 1, format, one.data());
    std::memcpy(out, one.data() + (layer * batch.width() + at % batch.width()) * row, row);
  }
  return nb::borrow<nb::bytes>(result);
}

auto stats(const Batch& batch) {
  const BatchStats& s = batch.stats();
  if (!batch.done()) throw std::logic_error("the batch is still being read");
  return nb::make_tuple(s.rows, s.distinct, s.cached, s.joined, s.reads, s.read_bytes, s.groups);
}

// RowError and OverloadedError, with RowError's facts as attributes.
void bind_errors(nb::module_& m) {
  nb::exception<Overloaded>(m, "OverloadedError");
  const nb::object row_error =
      nb::steal<nb::object>(PyErr_NewException("engram_kernels._core.RowError", nullptr, nullptr));
  m.attr("RowError") = row_error;
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* type) {
        try {
          std::rethrow_exception(thrown);
        } catch (const RowError& error) {
          const nb::handle row_error_type(static_cast<PyObject*>(type));
          nb::object instance = row_error_type(nb::str(error.what()));
          instance.attr("layer") = error.failure.layer;
          instance.attr("row") = error.failure.row;
          instance.attr("error") = error.failure.error;
          PyErr_SetObject(row_error_type.ptr(), instance.ptr());
        }
      },
      row_error.ptr());
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_errors(m);

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

  nb::class_<Table>(m, "Table")
      .def(
          "__init__",
          [](Table* self, std::int64_t layer, std::uint64_t rows, RowKind kind,
             const std::vector<Planes>& copies) {
            new (self) Table{.layer = layer,
                             .rows = rows,
                             .kind = kind,
                             .codes = copies.at(0).codes,
                             .scales = copies.at(0).scales};
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
      .def("pick", &pick, nb::arg("layer"), nb::arg("picks"), nb::arg("format"));

  nb::class_<Engine>(m, "Engine")
      .def(nb::new_([](std::shared_ptr<Reader> reader, std::vector<Table> tables,
                       std::uint64_t budget_bytes, std::uint64_t cache_bytes) {
             static_cast<void>(cache_bytes);
             return make_for_this_process<Engine>(std::move(reader), std::move(tables),
                                                  budget_bytes);
           }),
           nb::arg("reader"), nb::arg("tables"), nb::arg("budget_bytes") = std::uint64_t{1} << 30,
           nb::kw_only(), nb::arg("cache_bytes") = std::uint64_t{0})
      .def_prop_ro("event_fd", &Engine::event_fd)
      .def("completions", &Engine::take_completions)
      .def("submit", &submit, nb::arg("keys").noconvert(), nb::arg("notify") = false, nb::kw_only(),
           nb::arg("group") = 1, nb::arg("columns") = nb::none(), nb::arg("lane") = Lane::decode,
           nb::arg("deadline_s") = nb::none())
      .def("load_scales", &Engine::load_scales, nb::arg("layer"))
      .def(
          "scale_progress",
          [](const Engine& engine, std::int64_t layer) {
            const Engine::ScaleProgress progress = engine.scale_progress(layer);
            return nb::make_tuple(progress.loaded, progress.rows, progress.error);
          },
          nb::arg("layer"))
      .def("in_flight_bytes", &Engine::in_flight_bytes)
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace engram
