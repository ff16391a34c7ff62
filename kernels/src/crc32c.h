// CRC-32C (Castagnoli), the checksum that x86 has an instruction for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engram {

// The CRC of some bytes, given the CRC of those before them: crc32c(crc32c(0, a), b) is that of a
// and b laid end to end. Thread-safe; any alignment.
std::uint32_t crc32c(std::uint32_t crc, const std::byte* bytes, std::size_t count);

// The same without the instruction: what other CPUs run.
std::uint32_t crc32c_portable(std::uint32_t crc, const std::byte* bytes, std::size_t count);

}  // namespace engram
