#include "batch.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "dequant.h"

namespace engram {
namespace {

// How far ahead of the copy the source row is fetched.
constexpr std::size_t kPrefetchRows = 12;
constexpr std::size_t kCacheLineBytes = 64;

void prefetch_row(const std::byte* row, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLineBytes) __builtin_prefetch(row + at);
}

}  // namespace

std::string failure_text(const RowFailure& failure) {
  return "layer " + std::to_string(failure.layer) + ", row " + std::to_string(failure.row) +
         " could not be read: " + error_text(failure.error);
}

EngineShared::EngineShared(std::uint64_t budget_bytes)
    : budget_bytes(budget_bytes), event_fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (event_fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

EngineShared::~EngineShared() { ::close(event_fd); }

Batch::~Batch() { shared_->in_flight_bytes.fetch_sub(reserved_bytes_); }

bool Batch::wait(std::int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  return wake_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return done(); });
}

void Batch::check() const {
  if (!done()) throw std::logic_error("the batch is still being read");
  if (failure_) throw RowError(*failure_);
}

std::size_t Batch::gathered_bytes(std::size_t first, std::size_t count, Format format) const {
  check();
  if (first > positions_ || count > positions_ - first) {
    throw std::invalid_argument("positions " + std::to_string(first) + " to " +
                                std::to_string(first + count) + " of a batch of " +
                                std::to_string(positions_));
  }
  std::size_t row_bytes = 0;
  for (const LayerRows& rows : layers_) {
    const std::size_t bytes = output_bytes(rows.table.kind, format);
    if (row_bytes != 0 && bytes != row_bytes) {
      throw std::invalid_argument(
          "layers of different row kinds have no packed form in common; ask for them one by one");
    }
    row_bytes = bytes;
  }
  return count * layers_.size() * width_ * row_bytes;
}

void Batch::gather(std::size_t first, std::size_t count, Format format, std::byte* out) const {
  if (gathered_bytes(first, count, format) == 0) return;
  std::vector<ConvertRow> convert;
  for (const LayerRows& rows : layers_) convert.push_back(row_converter(rows.table.kind, format));
  const std::size_t row_bytes = output_bytes(layers_.front().table.kind, format);
  for (std::size_t position = first; position < first + count; ++position) {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const LayerRows& rows = layers_[l];
      const std::size_t packed = packed_bytes(rows.table.kind);
      const std::int32_t* const inverse = rows.inverse.data();
      const std::size_t begin = position * width_;
      const std::size_t end = rows.inverse.size();
      for (std::size_t i = begin; i < begin + width_; ++i, out += row_bytes) {
        if (i + kPrefetchRows < end && inverse[i + kPrefetchRows] >= 0) {
          prefetch_row(rows.packed + static_cast<std::size_t>(inverse[i + kPrefetchRows]) * packed,
                       packed);
        }
        if (inverse[i] < 0) {
          std::memset(out, 0, row_bytes);
        } else {
          convert[l](rows.packed + static_cast<std::size_t>(inverse[i]) * packed, out);
        }
      }
    }
  }
}

// The first read that failed, as the row it was for.
void Batch::find_failure() {
  const auto failed = std::ranges::find_if(errors_, [](std::int32_t error) { return error != 0; });
  if (failed == errors_.end()) return;
  const ReadItem& item = items_[static_cast<std::size_t>(failed - errors_.begin())];
  for (const LayerRows& rows : layers_) {
    const std::size_t packed = packed_bytes(rows.table.kind);
    if (item.dest < rows.packed || item.dest >= rows.packed + rows.distinct.size() * packed)
      continue;
    const auto index = static_cast<std::size_t>(item.dest - rows.packed) / packed;
    failure_ = {.layer = rows.table.layer, .row = rows.distinct[index], .error = *failed};
  }
}

// The batch fails as a whole, before any read.
void Batch::fail_unread() {
  if (!layers_.empty()) {
    const LayerRows& rows = layers_.front();
    failure_ = {.layer = rows.table.layer,
                .row = rows.distinct.empty() ? -1 : rows.distinct.front(),
                .error = ECANCELED};
  }
  finish();
}

// Gives the planning's and the reads' share of the budget back.
void Batch::release_work() {
  std::uint64_t kept = 0;
  for (const LayerRows& rows : layers_) {
    kept += rows.inverse.size() * sizeof(rows.inverse[0]) +
            rows.distinct.size() * (sizeof(rows.distinct[0]) + packed_bytes(rows.table.kind));
  }
  shared_->in_flight_bytes.fetch_sub(reserved_bytes_ - kept);
  reserved_bytes_ = kept;
}

// On the thread that ended the last read (or planned a batch without any).
void Batch::finish() {
  if (job_.any_failed.load(std::memory_order_relaxed)) find_failure();
  items_ = {};
  errors_ = {};
  release_work();
  const std::shared_ptr<Batch> keep = std::move(self_);
  {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    wake_.notify_all();
  }
  const std::lock_guard lock(shared_->mutex);
  if (notify_) {
    shared_->completions.push_back(tag_);
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the descriptor is readable already.
    [[maybe_unused]] const ssize_t written = ::write(shared_->event_fd, &one, sizeof one);
  }
  if (--shared_->running == 0) shared_->idle.notify_all();
}

}  // namespace engram
