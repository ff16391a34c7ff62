#include "record.h"

#include <bit>
#include <cstring>

#include "crc32c.h"

namespace engram {

static_assert(std::endian::native == std::endian::little, "numbers are hashed as they lie");

RecordSeal::RecordSeal(const StoreUuid& uuid, std::uint32_t layer) {
  std::array<std::byte, sizeof(uuid) + sizeof(layer)> prefix;
  std::memcpy(prefix.data(), uuid.data(), sizeof(uuid));
  std::memcpy(prefix.data() + sizeof(uuid), &layer, sizeof(layer));
  prefix_ = crc32c(0, prefix.data(), prefix.size());
}

std::uint32_t RecordSeal::of(std::uint64_t row, const std::byte* packed, std::size_t bytes) const {
  std::array<std::byte, sizeof(row)> id;
  std::memcpy(id.data(), &row, sizeof(row));
  return crc32c(crc32c(prefix_, id.data(), id.size()), packed, bytes);
}

bool RecordSeal::matches(std::uint64_t row, const std::byte* record, std::size_t bytes) const {
  std::uint32_t seal;
  std::memcpy(&seal, record + bytes, sizeof(seal));
  return seal == of(row, record, bytes);
}

}  // namespace engram
