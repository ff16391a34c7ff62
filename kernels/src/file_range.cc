#include "file_range.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>

#include "read.h"

namespace engram {

RangeReader::RangeReader(std::size_t bytes_max)
    : buffer_bytes_(aligned_span(kAlignmentMax - 1, bytes_max, kAlignmentMax)),
      buffer_(static_cast<std::byte*>(std::aligned_alloc(kAlignmentMax, buffer_bytes_))) {
  if (!buffer_) throw std::bad_alloc();
}

const std::byte* RangeReader::read(const DataFile& file, std::uint64_t offset, std::size_t bytes) {
  const std::uint64_t begin = offset / kAlignmentMax * kAlignmentMax;
  const std::size_t wanted = static_cast<std::size_t>(offset - begin) + bytes;
  const std::size_t span = aligned_span(offset, bytes, kAlignmentMax);
  for (std::size_t got = 0; got < wanted;) {
    // Only a whole number of aligned units may be skipped in a direct read.
    got = got / kAlignmentMax * kAlignmentMax;
    const ssize_t n =
        ::pread(file.fd(), buffer_.get() + got, span - got, static_cast<off_t>(begin + got));
    if (n < 0 && errno == EINTR) continue;
    const std::size_t arrived = got + static_cast<std::size_t>(std::max<ssize_t>(n, 0));
    if (n < 0 || arrived < std::min(wanted, got + kAlignmentMax)) {
      throw std::runtime_error("reading " + file.path() + " at byte " +
                               std::to_string(begin + got) +
                               " failed: " + error_text(n < 0 ? errno : kErrorTruncated));
    }
    got = arrived;
  }
  return buffer_.get() + (offset - begin);
}

}  // namespace engram
