// Python face of reader.h and files.h.
#include <liburing.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <system_error>

#include "arrays.h"
#include "bind_metrics.h"
#include "bindings.h"
#include "process.h"
#include "reader.h"

namespace nb = nanobind;

namespace engram {
namespace {

struct FileInfo {
  std::string path;
  std::uint64_t size_bytes;
  bool direct;
  std::uint32_t alignment_bytes;
  std::string reason;
};

std::vector<FileInfo> file_infos(const Reader& reader) {
  std::vector<FileInfo> infos;
  for (const DataFile& file : reader.files()) {
    infos.push_back(
        {file.path(), file.size_bytes(), file.direct(), file.alignment(), file.reason()});
  }
  return infos;
}

nb::dict counters(const Reader& reader) {
  const ReadCounters& from = reader.counters();
  nb::dict to;
  to["reads"] = from.reads.load();
  to["read_bytes"] = from.read_bytes.load();
  to["needed_bytes"] = from.needed_bytes.load();
  to["short_reads"] = from.short_reads.load();
  to["retries"] = from.retries.load();
  // In this order: they are some of the errors, which are counted before.
  to["truncated"] = from.truncated.load();
  to["errors"] = from.errors.load();
  return to;
}

// (file, table or -1, lane, counts, sum in ns) of all that has been read.
nb::list read_latencies(const Reader& reader) {
  nb::list all;
  for (std::uint32_t file = 0; file < reader.files().size(); ++file) {
    for (std::uint16_t table = 0; table < ReadMetrics::kTables; ++table) {
      for (const Lane lane : kAllLanes) {
        const Histogram& from = reader.metrics().device(file, table, lane);
        if (is_empty(from)) continue;
        const int known = table == ReadMetrics::kTables - 1 ? -1 : table;
        all.append(nb::make_tuple(file, known, lane) + histogram(from));
      }
    }
  }
  return all;
}

using Bytes2 = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

auto read_items(Reader& reader, const InputArray<std::uint32_t, 1>& file,
                const InputArray<std::uint64_t, 1>& offset,
                const InputArray<std::uint32_t, 1>& length, const Bytes2& out) {
  const std::size_t count = file.size();
  if (offset.size() != count || length.size() != count || out.shape(0) != count) {
    throw std::invalid_argument("file, offset, length and out must have the same number of items");
  }
  OutputArray<std::int32_t> errors(count);
  {
    nb::gil_scoped_release unlocked;
    std::vector<ReadItem> items(count);
    for (std::size_t i = 0; i < count; ++i) {
      const ReadItem item{.offset = offset.data()[i],
                          .dest = reinterpret_cast<std::byte*>(out.data()) + i * out.shape(1),
                          .file = file.data()[i],
                          .length = length.data()[i]};
      if (item.file >= reader.files().size() || item.length > out.shape(1) ||
          item.length > kReadBytesMax || item.length == 0 || item.offset > kOffsetMax) {
        throw std::invalid_argument(
            "item " + std::to_string(i) + ": file " + std::to_string(item.file) + ", length " +
            std::to_string(item.length) + ", offset " + std::to_string(item.offset) +
            " is out of range; lengths are 1 to " + std::to_string(kReadBytesMax) +
            " and no longer than a row of out, offsets below 2^63");
      }
      items[i] = item;
      errors.data()[i] = 0;
    }
    reader.read(items, {errors.data(), count});
  }
  return errors.release({count});
}

// What recording a read costs, in ns, when so many come together and share a look at the clock.
double recording_ns(std::uint64_t reads, std::uint64_t together) {
  if (together == 0) throw std::invalid_argument("at least one read comes together");
  nb::gil_scoped_release unlocked;
  ReadMetrics metrics(1);
  ReadCounters counters;
  constexpr auto relaxed = std::memory_order_relaxed;
  const std::int64_t began = now_ns();
  for (std::uint64_t done = 0; done < reads; done += together) {
    // As ReadQueue::claim(), the backend and count_end() do it.
    const std::int64_t claimed = now_ns();
    metrics.queued(Lane::decode).add(claimed - began, together);
    const std::int64_t ended = now_ns();
    for (std::uint64_t read = 0; read < together; ++read) {
      counters.reads.fetch_add(1, relaxed);
      counters.read_bytes.fetch_add(512, relaxed);
      counters.needed_bytes.fetch_add(140, relaxed);
      metrics.device(0, 0, Lane::decode).add(ended - claimed + 80'000);
    }
  }
  return static_cast<double>(now_ns() - began) / static_cast<double>(counters.reads.load());
}

nb::dict probe_io_uring() {
  const RingProbe probe = probe_ring();
  nb::list flags;
  if (probe.flags & IORING_SETUP_SINGLE_ISSUER) flags.append("SINGLE_ISSUER");
  if (probe.flags & IORING_SETUP_DEFER_TASKRUN) flags.append("DEFER_TASKRUN");
  if (probe.flags & IORING_SETUP_COOP_TASKRUN) flags.append("COOP_TASKRUN");
  nb::dict result;
  result["ok"] = probe.error == 0;
  result["errno"] = probe.error;
  result["reason"] = probe.reason;
  result["setup_flags"] = flags;
  return result;
}

std::pair<std::uint32_t, std::uint32_t> dioalign(const std::string& path) {
  const DirectAlignment alignment = statx_dioalign(path);
  return {alignment.memory, alignment.offset};
}

}  // namespace

void bind_reader(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      const nb::object args = nb::make_tuple(error.code().value(), nb::str(error.what()));
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });

  nb::class_<FileInfo>(m, "FileInfo")
      .def_ro("path", &FileInfo::path)
      .def_ro("size_bytes", &FileInfo::size_bytes)
      .def_ro("direct", &FileInfo::direct)
      .def_ro("alignment_bytes", &FileInfo::alignment_bytes)
      .def_ro("reason", &FileInfo::reason);

  nb::class_<Reader>(m, "Reader")
      .def(nb::new_([](std::vector<std::string> paths, std::string backend, unsigned depth,
                       unsigned threads, unsigned bulk_depth) {
             nb::gil_scoped_release unlocked;
             return make_for_this_process<Reader>(std::move(paths),
                                                  ReaderOptions{.backend = std::move(backend),
                                                                .depth = depth,
                                                                .bulk_depth = bulk_depth,
                                                                .threads = threads});
           }),
           nb::arg("paths"), nb::arg("backend") = "auto", nb::arg("depth") = 64,
           nb::arg("threads") = 0, nb::kw_only(), nb::arg("bulk_depth") = 0)
      .def_prop_ro("backend", [](const Reader& r) { return r.state().backend; })
      .def_prop_ro("reason", [](const Reader& r) { return r.state().reason; })
      .def_prop_ro("fallback", [](const Reader& r) { return r.state().fallback; })
      .def_prop_ro("broken", [](const Reader& r) { return r.state().broken; })
      .def_prop_ro("threads", [](const Reader& r) { return r.state().threads; })
      .def_prop_ro("registered", [](const Reader& r) { return r.state().registered; })
      .def_prop_ro("depth", &Reader::depth)
      .def_prop_ro("bulk_depth", &Reader::bulk_depth)
      .def_prop_ro("files", &file_infos)
      .def("counters", &counters)
      .def("in_flight", &Reader::in_flight, nb::arg("file"))
      .def("read_latencies", &read_latencies)
      .def(
          "queue_latency",
          [](const Reader& r, Lane lane) { return histogram(r.metrics().queued(lane)); },
          nb::arg("lane"))
      .def("change", &Reader::change, nb::call_guard<nb::gil_scoped_release>())
      .def("read", &read_items, nb::arg("file").noconvert(), nb::arg("offset").noconvert(),
           nb::arg("length").noconvert(), nb::arg("out").noconvert())
      .def("close", &Reader::close, nb::call_guard<nb::gil_scoped_release>());

  nb::tuple bounds = nb::tuple(nb::cast(
      std::vector<std::int64_t>(Histogram::kBoundsUs.begin(), Histogram::kBoundsUs.end())));
  m.attr("LATENCY_BOUNDS_US") = bounds;
  m.attr("ERROR_TRUNCATED") = kErrorTruncated;
  m.attr("ERROR_CHECKSUM") = kErrorChecksum;
  m.attr("READ_BUFFER_BYTES") = kSlotBytes;
  m.def("error_text", &error_text, nb::arg("error"));
  m.def("probe_io_uring", &probe_io_uring);
  m.def("recording_ns", &recording_ns, nb::arg("reads"), nb::arg("together"));
  m.def("statx_dioalign", &dioalign, nb::arg("path"));
  m.def("hardware_queues", &hardware_queues, nb::arg("path"));
}

}  // namespace engram
