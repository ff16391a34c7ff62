// Python face of format.h and dequant.h.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "dequant.h"

namespace nb = nanobind;

namespace engram {
namespace {

using PackedRows = nb::ndarray<const std::uint8_t, nb::c_contig, nb::device::cpu>;
using OutputRows = nb::ndarray<std::uint8_t, nb::c_contig, nb::device::cpu>;

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  for (const Simd simd : supported_simd()) names.emplace_back(simd_name(simd));
  return names;
}

Simd simd_by_name(const std::optional<std::string>& name) {
  const std::vector<Simd> supported = supported_simd();
  if (!name) return supported.front();
  std::string names;
  for (const Simd simd : supported) {
    if (simd_name(simd) == *name) return simd;
    names += (names.empty() ? "" : ", ") + std::string(simd_name(simd));
  }
  throw std::invalid_argument("simd level \"" + *name + "\" cannot run on this CPU; it has " +
                              names);
}

template <typename Array>
std::string shape_text(const Array& array) {
  std::string text = "[";
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(array.shape(i));
  }
  return text + "]";
}

template <typename Array>
void check_rows(const Array& array, const char* name, std::size_t row_bytes) {
  if (array.ndim() == 2 && array.shape(1) == row_bytes) return;
  throw std::invalid_argument(std::string(name) + " has shape " + shape_text(array) +
                              "; these rows need [n, " + std::to_string(row_bytes) + "]");
}

void convert_rows(RowKind kind, Format format, const PackedRows& packed, const OutputRows& out,
                  const std::optional<std::string>& simd) {
  const std::size_t row_bytes = packed_bytes(kind), out_bytes = output_bytes(kind, format);
  check_rows(packed, "packed", row_bytes);
  check_rows(out, "out", out_bytes);
  const std::size_t rows = packed.shape(0);
  if (out.shape(0) != rows) {
    throw std::invalid_argument("packed has " + std::to_string(rows) + " rows but out has " +
                                std::to_string(out.shape(0)) + "; give out one row for each");
  }
  const auto* from = reinterpret_cast<const std::byte*>(packed.data());
  auto* to = reinterpret_cast<std::byte*>(out.data());
  if (rows != 0 && from < to + rows * out_bytes && to < from + rows * row_bytes) {
    throw std::invalid_argument("packed and out share memory; give out memory of its own");
  }
  const ConvertRow convert = row_converter(kind, format, simd_by_name(simd));
  const nb::gil_scoped_release unlocked;
  for (std::size_t i = 0; i < rows; ++i) convert(from + i * row_bytes, to + i * out_bytes);
}

}  // namespace

void bind_dequant(nb::module_& m) {
  nb::enum_<RowKind>(m, "RowKind", "How a table stores its codes.")
      .value("FP4", RowKind::fp4)
      .value("FP8", RowKind::fp8);
  nb::enum_<Format>(m, "Format", "What a lookup returns; PACKED is the table's own bytes.")
      .value("PACKED", Format::packed)
      .value("PACKED_FP8", Format::packed_fp8)
      .value("BF16", Format::bf16)
      .value("FP32", Format::fp32);
  m.def("packed_row_bytes", &packed_bytes, nb::arg("kind"), "136 for FP4, 264 for FP8.");
  m.def("output_row_bytes", &output_bytes, nb::arg("kind"), nb::arg("format"),
        "Bytes of one row in `format`.");
  m.def("simd_levels", &simd_levels, "Levels this CPU can run, best first.");
  // noconvert: a silent copy of `out` would be written and thrown away.
  m.def("convert_rows", &convert_rows, nb::arg("kind"), nb::arg("format"),
        nb::arg("packed").noconvert(), nb::arg("out").noconvert(), nb::arg("simd") = nb::none(),
        "Convert packed rows [n, packed_row_bytes] into out [n, output_row_bytes].");
}

}  // namespace engram
