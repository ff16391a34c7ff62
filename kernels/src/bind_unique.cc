// Python face of unique.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "unique.h"

namespace nb = nanobind;

namespace engram {
namespace {

auto unique_ids_of(const InputArray<std::int64_t, 1>& ids) {
  OutputArray<std::int32_t> inverse(ids.size());
  std::vector<std::int64_t> distinct;
  {
    nb::gil_scoped_release unlocked;
    unique_ids(as_span(ids), distinct, inverse.data());
  }
  OutputArray<std::int64_t> result(distinct.size());
  std::ranges::copy(distinct, result.data());
  return std::pair(result.release({distinct.size()}), inverse.release({ids.size()}));
}

}  // namespace

void bind_unique(nb::module_& m) {
  m.def("unique_ids", &unique_ids_of, nb::arg("ids").noconvert(),
        "Distinct ids in order of first appearance, and the inverse; -1 is left out.");
}

}  // namespace engram
