// Long sequential reads, for what is loaded whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "files.h"

namespace engram {

class RangeReader {
 public:
  // For ranges of up to `bytes_max`. Throws std::bad_alloc.
  explicit RangeReader(std::size_t bytes_max);

  // `bytes` of a file from `offset` on, whatever its alignment; they stay until the next call.
  // Throws std::runtime_error with a sentence when they cannot be had.
  const std::byte* read(const DataFile& file, std::uint64_t offset, std::size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::size_t buffer_bytes_;
  std::unique_ptr<std::byte, Free> buffer_;
};

}  // namespace engram
