#include "crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace engram {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as they lie");

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // bits reversed

// [k][byte]: what `byte` followed by k zero bytes does to the CRC, so that 8 bytes take one step.
constexpr auto kTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = before >> 8 ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}();

std::uint64_t load_word(const std::byte* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

#if defined(__x86_64__)

const bool kHasInstruction = [] {
  __builtin_cpu_init();  // this may run before the compiler's own constructor
  return __builtin_cpu_supports("sse4.2") != 0;
}();

// Three cycles for 8 bytes, each waiting for the one before. Records are short and independent of
// one another, so the CPU overlaps those of neighbours by itself.
[[gnu::target("sse4.2")]] std::uint32_t with_instruction(std::uint32_t crc, const std::byte* bytes,
                                                         std::size_t count) {
  std::uint64_t state = ~crc;
  for (; count >= 8; bytes += 8, count -= 8) state = _mm_crc32_u64(state, load_word(bytes));
  auto tail = static_cast<std::uint32_t>(state);
  for (; count != 0; ++bytes, --count)
    tail = _mm_crc32_u8(tail, std::to_integer<unsigned char>(*bytes));
  return ~tail;
}

#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const std::byte* bytes, std::size_t count) {
#if defined(__x86_64__)
  if (kHasInstruction) [[likely]]
    return with_instruction(crc, bytes, count);
#endif
  return crc32c_portable(crc, bytes, count);
}

std::uint32_t crc32c_portable(std::uint32_t crc, const std::byte* bytes, std::size_t count) {
  std::uint32_t state = ~crc;
  for (; count >= 8; bytes += 8, count -= 8) {
    const std::uint64_t word = load_word(bytes) ^ state;
    state = 0;
    for (std::size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][word >> (8 * k) & 0xFF];
  }
  for (; count != 0; ++bytes, --count) {
    state = state >> 8 ^ kTables[0][(state ^ std::to_integer<std::uint32_t>(*bytes)) & 0xFF];
  }
  return ~state;
}

}  // namespace engram
