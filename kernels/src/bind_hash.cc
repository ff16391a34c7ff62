// Python face of hash.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <stdexcept>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "hash.h"

namespace nb = nanobind;

namespace engram {
namespace {

using Matrix = InputArray<std::uint64_t, 2>;

void construct(NgramHash* self, const InputArray<std::int32_t, 1>& token_map,
               std::int64_t pad_class, std::int64_t image_token_id, const Matrix& multipliers,
               const Matrix& primes, const Matrix& offsets) {
  const std::size_t layers = multipliers.shape(0);
  if (primes.shape(0) != layers || offsets.shape(0) != layers) {
    throw std::invalid_argument("multipliers, primes and offsets must have one line per layer");
  }
  new (self) NgramHash(as_span(token_map), pad_class, image_token_id, layers, as_span(multipliers),
                       as_span(primes), as_span(offsets));
}

auto rows(const NgramHash& hash, const InputArray<std::int32_t, 1>& tokens,
          const InputArray<std::int64_t, 1>& lengths, const InputArray<std::int32_t, 1>& history,
          const InputArray<std::int64_t, 1>& history_lengths) {
  const std::size_t count = tokens.size();
  OutputArray<std::int64_t> rows(count * hash.layers() * hash.columns());
  OutputArray<bool> mask(count);
  {
    nb::gil_scoped_release unlocked;
    hash.rows(as_span(tokens), as_span(lengths), as_span(history), as_span(history_lengths),
              rows.data(), mask.data());
  }
  return std::pair(rows.release({count, hash.layers(), hash.columns()}), mask.release({count}));
}

}  // namespace

void bind_hash(nb::module_& m) {
  nb::class_<NgramHash>(m, "NgramHash", "Token ids -> row ids.")
      .def("__init__", &construct, nb::arg("token_map").noconvert(), nb::arg("pad_class"),
           nb::arg("image_token_id"), nb::arg("multipliers").noconvert(),
           nb::arg("primes").noconvert(), nb::arg("offsets").noconvert())
      .def("rows", &rows, nb::arg("tokens").noconvert(), nb::arg("lengths").noconvert(),
           nb::arg("history").noconvert(), nb::arg("history_lengths").noconvert());
}

}  // namespace engram
