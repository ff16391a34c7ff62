// How rows leave memory: copied or converted, and past the CPU's caches when there are many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "dequant.h"
#include "format.h"

namespace engram {

// Inlined always: a function that does nothing but fetch ahead counts as one without effect, and
// calls of it are dropped.
[[gnu::always_inline]] inline void prefetch_bytes(const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kCacheLineBytes = 64;
  for (std::size_t at = 0; at < bytes; at += kCacheLineBytes) __builtin_prefetch(from + at);
}

// Rows of one kind in one format.
class RowOutput {
 public:
  // all_bytes: of everything that is to be written.
  RowOutput(RowKind kind, Format format, std::size_t all_bytes)
      : convert_(row_converter(kind, format)),
        packed_bytes_(engram::packed_bytes(kind)),
        row_bytes_(output_bytes(kind, format)),
        as_they_are_(format == Format::packed),
        past_caches_(all_bytes > kCachedBytesMax),
        stream_(past_caches_ ? streaming_converter(kind, format) : nullptr) {}

  std::size_t packed_bytes() const { return packed_bytes_; }

  // Writes `rows` rows that lie one after another. Returns where the next ones go.
  std::byte* write(const std::byte* from, std::size_t rows, std::byte* out) const {
    if (as_they_are_) {
      copy(from, rows * packed_bytes_, out);
    } else {
      const bool aligned = reinterpret_cast<std::uintptr_t>(out) % kStreamAlignment == 0;
      const ConvertRow convert = stream_ != nullptr && aligned ? stream_ : convert_;
      for (std::size_t r = 0; r < rows; ++r) {
        convert(from + r * packed_bytes_, out + r * row_bytes_);
      }
    }
    return out + rows * row_bytes_;
  }
  std::byte* write_zeros(std::size_t rows, std::byte* out) const {
    std::memset(out, 0, rows * row_bytes_);
    return out + rows * row_bytes_;
  }

  // After the last write, before anybody else is told of it.
  static void finish() {
#ifdef __SSE2__
    _mm_sfence();
#endif
  }

 private:
  // More bytes than this the CPU's caches could not keep, and writing through them means that every
  // line is read first.
  static constexpr std::size_t kCachedBytesMax = 2 << 20;

  void copy(const std::byte* from, std::size_t bytes, std::byte* out) const {
#ifdef __SSE2__
    constexpr std::size_t kUnit = sizeof(__m128i);
    const auto addresses =
        reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(out);
    if (past_caches_ && (addresses | bytes) % kUnit == 0) {
      for (std::size_t at = 0; at < bytes; at += kUnit) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + at),
                         _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
      }
      return;
    }
#endif
    std::memcpy(out, from, bytes);
  }

  ConvertRow convert_;
  std::size_t packed_bytes_;
  std::size_t row_bytes_;
  bool as_they_are_;
  bool past_caches_;
  ConvertRow stream_;  // null: convert_ it is
};

}  // namespace engram
