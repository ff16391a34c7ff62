#include "resident.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "file_range.h"
#include "read.h"
#include "record.h"

namespace engram {
namespace {

// Rows read at once: about a megabyte, the disk's sequential speed.
constexpr std::uint64_t kChunkPages = 256;
constexpr std::uint64_t kChunkRows = 8192;

}  // namespace

ResidentRows::ResidentRows(const std::vector<DataFile>& files, const Table& table)
    : files_(files),
      copy_(table.copies.front()),
      layer_(table.layer),
      kind_(table.kind),
      rows_(table.rows),
      row_bytes_(packed_bytes(table.kind)),
      memory_bytes_(rows_ * row_bytes_) {
  void* const memory = ::mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::byte*>(memory);
  ::madvise(memory_, memory_bytes_, MADV_HUGEPAGE);
}

ResidentRows::~ResidentRows() { ::munmap(memory_, memory_bytes_); }

std::string ResidentRows::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void ResidentRows::load(const std::atomic<bool>& stop) {
  try {
    for (std::uint64_t row = 0; row < rows_ && !stop.load(std::memory_order_relaxed);) {
      row += copy_.pages ? load_pages(row) : load_planes(row);
      rows_loaded_.store(row, std::memory_order_release);
    }
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    error_ = error.what();
  }
}

// Each returns the number of rows it loaded from `first` on.
std::uint64_t ResidentRows::load_planes(std::uint64_t first) {
  const std::uint64_t count = std::min(kChunkRows, rows_ - first);
  // To the end of the last row and not of its stride: the file may end there.
  const auto read = [&](RangeReader& reader, const Plane& plane, std::size_t bytes) {
    return reader.read(files_[plane.file], plane.offset + first * plane.stride,
                       (count - 1) * plane.stride + bytes);
  };
  const Plane& code_plane = copy_.planes.codes;
  const Plane& scale_plane = copy_.planes.scales;
  if (!codes_) codes_.emplace(kChunkRows * code_plane.stride);
  if (!scales_) scales_.emplace(kChunkRows * scale_plane.stride);
  const std::byte* const codes = read(*codes_, code_plane, row_bytes_ - kScaleBytes);
  const std::byte* const scales = read(*scales_, scale_plane, kScaleBytes);
  std::byte* row = memory_ + first * row_bytes_;
  for (std::uint64_t i = 0; i < count; ++i, row += row_bytes_) {
    std::memcpy(row, codes + i * code_plane.stride, row_bytes_ - kScaleBytes);
    std::memcpy(row + row_bytes_ - kScaleBytes, scales + i * scale_plane.stride, kScaleBytes);
  }
  return count;
}

std::uint64_t ResidentRows::load_pages(std::uint64_t first) {
  const RecordFormat format = RecordFormat::of(kind_);
  const std::uint64_t count = std::min(kChunkPages * format.records_per_page, rows_ - first);
  if (!codes_) codes_.emplace(kChunkPages * kPageBytes);
  const DataFile& file = files_[copy_.pages->file];
  const std::byte* const pages = codes_->read(file, copy_.pages->offset + format.offset_of(first),
                                              format.pages_of(count) * kPageBytes);
  const RecordSeal seal(copy_.pages->uuid, static_cast<std::uint32_t>(layer_));
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::byte* const record = pages + format.offset_of(i);
    if (!seal.matches(first + i, record, row_bytes_)) {
      throw std::runtime_error("row " + std::to_string(first + i) + " of " + file.path() + ": " +
                               error_text(kErrorChecksum));
    }
    std::memcpy(memory_ + (first + i) * row_bytes_, record, row_bytes_);
  }
  return count;
}

}  // namespace engram
