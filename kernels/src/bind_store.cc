// Python face of crc32c.h, record.h, repack.h and pages.h.
#include <fcntl.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "crc32c.h"
#include "pages.h"
#include "record.h"
#include "repack.h"

namespace nb = nanobind;

namespace engram {
namespace {

// Rows or planes [n, bytes]; axis 0 may be strided.
using Plane2d = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu>;
using OutputBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::byte> as_bytes(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

StoreUuid uuid_of(const nb::bytes& bytes) {
  StoreUuid uuid;
  if (bytes.size() != uuid.size()) {
    throw std::invalid_argument("a store's UUID has 16 bytes, not " + std::to_string(bytes.size()));
  }
  std::memcpy(uuid.data(), bytes.data(), uuid.size());
  return uuid;
}

void check_size(const char* what, std::size_t size, std::size_t wanted) {
  if (size == wanted) return;
  throw std::invalid_argument(std::string(what) + " has " + std::to_string(size) +
                              " bytes; these rows need " + std::to_string(wanted));
}

const std::byte* plane_data(const char* what, const Plane2d& plane, std::size_t width) {
  if (plane.shape(1) != width || plane.stride(1) != 1 || plane.stride(0) < 0) {
    throw std::invalid_argument(std::string(what) + " is not [n, " + std::to_string(width) +
                                "] with the bytes of a row side by side");
  }
  return reinterpret_cast<const std::byte*>(plane.data());
}

SourceRows source_rows(RowKind kind, const Plane2d& codes, const Plane2d& scales) {
  if (codes.shape(0) != scales.shape(0)) {
    throw std::invalid_argument("codes has " + std::to_string(codes.shape(0)) +
                                " rows but scales has " + std::to_string(scales.shape(0)));
  }
  return {kind,
          codes.shape(0),
          plane_data("codes", codes, code_bytes(kind)),
          static_cast<std::size_t>(codes.stride(0)),
          plane_data("scales", scales, kScaleBytes),
          static_cast<std::size_t>(scales.stride(0))};
}

auto row_array(const std::vector<std::uint64_t>& rows) {
  OutputArray<std::int64_t> result(rows.size());
  std::ranges::transform(rows, result.data(),
                         [](auto row) { return static_cast<std::int64_t>(row); });
  return result.release({rows.size()});
}

nb::tuple report_tuple(const PackReport& report) {
  const std::size_t count = report.suspects.size();
  OutputArray<std::int64_t> rows(count);
  OutputArray<std::uint8_t> why(count);
  for (std::size_t i = 0; i < count; ++i) {
    rows.data()[i] = static_cast<std::int64_t>(report.suspects[i].row);
    why.data()[i] = report.suspects[i].why;
  }
  return nb::make_tuple(rows.release({count}), why.release({count}), report.clipped_blocks);
}

std::uint32_t crc32c_of(const nb::bytes& data, std::uint32_t crc, bool portable) {
  const std::span<const std::byte> bytes = as_bytes(data);
  const nb::gil_scoped_release unlocked;
  return (portable ? crc32c_portable : crc32c)(crc, bytes.data(), bytes.size());
}

std::uint32_t record_seal(const nb::bytes& uuid, std::uint32_t layer, std::uint64_t row,
                          const nb::bytes& packed) {
  const std::span<const std::byte> bytes = as_bytes(packed);
  return RecordSeal(uuid_of(uuid), layer).of(row, bytes.data(), bytes.size());
}

nb::tuple pack_rows_of(RowKind source, const Plane2d& codes, const Plane2d& scales,
                       std::uint64_t first, RowKind kind, const OutputBytes& out) {
  const SourceRows rows = source_rows(source, codes, scales);
  check_size("out", out.size(), rows.count * packed_bytes(kind));
  PackReport report;
  {
    const nb::gil_scoped_release unlocked;
    report = pack_rows(rows, first, kind, reinterpret_cast<std::byte*>(out.data()));
  }
  return report_tuple(report);
}

nb::tuple seal_pages_of(RowKind source, const Plane2d& codes, const Plane2d& scales,
                        std::uint64_t first, RowKind kind, const nb::bytes& uuid,
                        std::uint32_t layer, std::uint64_t origin, const OutputBytes& pages) {
  const SourceRows rows = source_rows(source, codes, scales);
  const RecordFormat format = RecordFormat::of(kind);
  if (origin % format.records_per_page != 0 || first < origin ||
      format.pages_of(first - origin + rows.count) * kPageBytes > pages.size()) {
    throw std::invalid_argument(
        "rows " + std::to_string(first) + " to " + std::to_string(first + rows.count) +
        " do not lie in these pages, which begin at row " + std::to_string(origin));
  }
  const RecordSeal seal(uuid_of(uuid), layer);
  PackReport report;
  {
    const nb::gil_scoped_release unlocked;
    report =
        seal_pages(rows, first, kind, seal, origin, reinterpret_cast<std::byte*>(pages.data()));
  }
  return report_tuple(report);
}

nb::tuple check_pages_of(const InputArray<std::uint8_t, 1>& pages, std::uint64_t first,
                         std::size_t count, RowKind kind, const nb::bytes& uuid,
                         std::uint32_t layer) {
  const RecordFormat format = RecordFormat::of(kind);
  check_size("pages", pages.size(), format.pages_of(count) * kPageBytes);
  if (first % format.records_per_page != 0) {
    throw std::invalid_argument("row " + std::to_string(first) + " does not begin a page");
  }
  const RecordSeal seal(uuid_of(uuid), layer);
  PageFaults faults;
  {
    const nb::gil_scoped_release unlocked;
    faults =
        check_pages(reinterpret_cast<const std::byte*>(pages.data()), first, count, kind, seal);
  }
  return nb::make_tuple(row_array(faults.rows), row_array(faults.pages));
}

auto row_cosines(const Plane2d& codes, const Plane2d& scales, const Plane2d& packed_fp4) {
  const SourceRows rows = source_rows(RowKind::fp8, codes, scales);
  const std::byte* fp4 = plane_data("packed_fp4", packed_fp4, packed_bytes(RowKind::fp4));
  if (packed_fp4.shape(0) != rows.count) {
    throw std::invalid_argument("packed_fp4 has " + std::to_string(packed_fp4.shape(0)) +
                                " rows but codes has " + std::to_string(rows.count));
  }
  OutputArray<double> cosines(rows.count);
  {
    const nb::gil_scoped_release unlocked;
    for (std::size_t i = 0; i < rows.count; ++i) {
      cosines.data()[i] =
          row_cosine(rows.codes + i * rows.codes_stride, rows.scales + i * rows.scales_stride,
                     fp4 + i * static_cast<std::size_t>(packed_fp4.stride(0)));
    }
  }
  return cosines.release({rows.count});
}

// Not posix_fallocate: where a file system cannot, it would write every block instead.
int reserve_file(int fd, std::int64_t bytes) {
  const nb::gil_scoped_release unlocked;
  while (::fallocate(fd, 0, 0, bytes) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace

void bind_store(nb::module_& m) {
  m.attr("PAGE_BYTES") = kPageBytes;
  m.attr("NAN_CODE") = kNanCode;
  m.attr("SCALE_255") = kScale255;
  m.def("crc32c", &crc32c_of, nb::arg("data"), nb::arg("crc") = 0, nb::arg("portable") = false,
        "CRC-32C of bytes, going on from the CRC of those before them.");
  m.def("record_seal", &record_seal, nb::arg("uuid"), nb::arg("layer"), nb::arg("row"),
        nb::arg("packed"), "The CRC-32C that follows a packed row in a store.");
  m.def(
      "record_offset",
      [](RowKind kind, std::uint64_t row) { return RecordFormat::of(kind).offset_of(row); },
      nb::arg("kind"), nb::arg("row"), "Where a row's record begins, from its table's first page.");
  m.def(
      "records_per_page", [](RowKind kind) { return RecordFormat::of(kind).records_per_page; },
      nb::arg("kind"), "29 for FP4, 15 for FP8.");
  m.def("pack_rows", &pack_rows_of, nb::arg("source"), nb::arg("codes").noconvert(),
        nb::arg("scales").noconvert(), nb::arg("first"), nb::arg("kind"),
        nb::arg("out").noconvert(), "Rows packed back to back, re-coded where the kinds differ.");
  m.def("seal_pages", &seal_pages_of, nb::arg("source"), nb::arg("codes").noconvert(),
        nb::arg("scales").noconvert(), nb::arg("first"), nb::arg("kind"), nb::arg("uuid"),
        nb::arg("layer"), nb::arg("origin"), nb::arg("pages").noconvert(),
        "Rows as records of a store's pages.");
  m.def("check_pages", &check_pages_of, nb::arg("pages").noconvert(), nb::arg("first"),
        nb::arg("count"), nb::arg("kind"), nb::arg("uuid"), nb::arg("layer"),
        "Rows whose seal does not match, and pages whose padding is not zero.");
  m.def("row_cosines", &row_cosines, nb::arg("codes").noconvert(), nb::arg("scales").noconvert(),
        nb::arg("packed_fp4").noconvert(), "Cosine of each FP8 row and its FP4 form.");
  m.def("reserve_file", &reserve_file, nb::arg("fd"), nb::arg("bytes"),
        "fallocate; returns 0 or an errno.");
}

}  // namespace engram
