// Python face of crc32c.h and record.h.
#include <nanobind/nanobind.h>

#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "crc32c.h"
#include "record.h"

namespace nb = nanobind;

namespace engram {
namespace {

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

}  // namespace

void bind_store(nb::module_& m) {
  m.def("crc32c", &crc32c_of, nb::arg("data"), nb::arg("crc") = 0, nb::arg("portable") = false,
        "CRC-32C of bytes, going on from the CRC of those before them.");
  m.def("record_seal", &record_seal, nb::arg("uuid"), nb::arg("layer"), nb::arg("row"),
        nb::arg("packed"), "The CRC-32C that follows a packed row in a store.");
  m.def(
      "record_offset",
      [](RowKind kind, std::uint64_t row) { return RecordFormat::of(kind).offset_of(row); },
      nb::arg("kind"), nb::arg("row"), "Where a row's record begins, from its table's first page.");
}

}  // namespace engram
