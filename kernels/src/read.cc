#include "read.h"

#include <cerrno>
#include <cstring>

namespace engram {

std::string error_text(std::int32_t error) {
  if (error == 0) return "no error";
  if (error == kErrorTruncated) return "the file ends before the row does: it was truncated";
  if (error == kErrorChecksum) {
    return "its checksum does not match: the store is damaged, or was changed while it was open";
  }
  return std::strerror(error);
}

void ReadProgress::start(const Read& read, const DataFile& file) {
  offset_ = read.offset;
  length_ = read.length;
  alignment_ = file.alignment();
  begin_ = offset_ / alignment_ * alignment_;
  head_ = static_cast<std::uint32_t>(offset_ - begin_);
  span_ = static_cast<std::uint32_t>(aligned_span(offset_, length_, alignment_));
  got_ = 0;
  resume_ = 0;
}

ReadProgress::Next ReadProgress::advance(std::int64_t result, DataFile& file) {
  if (result < 0) {
    const auto error = static_cast<std::int32_t>(-result);
    if ((error == EINTR || error == EAGAIN) && retries_ < kRetriesMax) {
      ++retries_;
      return Next::again;
    }
    if (error == EINVAL && file.promote_alignment(alignment_)) {
      ++retries_;
      start({.offset = offset_, .length = length_}, file);
      return Next::again;
    }
    error_ = error;
    return Next::failed;
  }
  const std::uint32_t arrived = resume_ + static_cast<std::uint32_t>(result);
  if (arrived >= head_ + length_) return Next::done;
  was_short_ = true;
  // A short read goes on from the last aligned byte while there is progress; none means the file
  // ends here.
  if (arrived <= got_) {
    error_ = kErrorTruncated;
    return Next::failed;
  }
  got_ = arrived;
  resume_ = got_ / alignment_ * alignment_;
  return Next::again;
}

}  // namespace engram
