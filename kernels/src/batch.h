// One submitted set of rows: its ids, its packed rows once they are read, and their gathering in
// any format.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "format.h"
#include "read_job.h"

namespace engram {

// Row r of a plane lies at offset + r * stride of a file of the reader.
struct Plane {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t stride = 0;
};

// A table in place: codes and scales of a row lie apart.
struct Planes {
  Plane codes;
  Plane scales;
};

// Whose reads go first.
enum class Lane : std::uint8_t { decode = 0, prefill = 1, prefetch = 2 };

struct Table {
  std::int64_t layer = 0;
  std::uint64_t rows = 0;
  RowKind kind = RowKind::fp4;
  Plane codes;
  Plane scales;
};

struct RowFailure {
  std::int64_t layer = 0;
  std::int64_t row = 0;
  std::int32_t error = 0;
};
std::string failure_text(const RowFailure& failure);

class RowError : public std::runtime_error {
 public:
  explicit RowError(const RowFailure& failure)
      : std::runtime_error(failure_text(failure)), failure(failure) {}
  RowFailure failure;
};

struct BatchStats {
  std::uint64_t rows = 0;
  std::uint64_t distinct = 0;
  std::uint64_t cached = 0;
  std::uint64_t joined = 0;
  std::uint64_t reads = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t groups = 0;
};

// What batches and their engine share; outlives both.
struct EngineShared {
  explicit EngineShared(std::uint64_t budget_bytes);
  ~EngineShared();

  const std::uint64_t budget_bytes;
  std::atomic<std::uint64_t> in_flight_bytes{0};

  std::mutex mutex;
  std::condition_variable idle;
  std::uint64_t running = 0;               // batches whose reads have not all ended
  std::vector<std::uint64_t> completions;  // tags, for event_fd
  int event_fd = -1;
};

// One submitted set of rows. Immutable once done; its packed rows live as long as it does.
class Batch {
 public:
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  std::uint64_t tag() const { return tag_; }
  std::size_t positions() const { return positions_; }
  std::size_t width() const { return width_; }
  std::size_t layers() const { return layers_.size(); }
  bool done() const { return done_.load(std::memory_order_acquire); }
  // False when `timeout_ms` passed first.
  bool wait(std::int64_t timeout_ms);

  // The rest needs done().
  const std::optional<RowFailure>& failure() const { return failure_; }
  const BatchStats& stats() const { return stats_; }
  // Throws RowError when a row failed.
  void check() const;
  // Bytes of a gather; throws what it would throw: as check(), and std::invalid_argument for
  // positions that the batch has not.
  std::size_t gathered_bytes(std::size_t first, std::size_t count, Format format) const;
  // Rows of positions first .. first + count - 1 as [count, layers, width, row].
  void gather(std::size_t first, std::size_t count, Format format, std::byte* out) const;

 private:
  friend class Engine;
  struct LayerRows {
    Table table;
    std::vector<std::int64_t> ids;  // [positions * width]; given up once planned
    std::vector<std::int64_t> distinct;
    std::vector<std::int32_t> inverse;  // [positions * width] -> distinct, -1 = zero row
    std::byte* packed = nullptr;        // [distinct, packed row]
  };

  explicit Batch(std::shared_ptr<EngineShared> shared) : shared_(std::move(shared)) {}
  void cancel() { job_.cancelled.store(true, std::memory_order_relaxed); }
  void fail_unread();
  void find_failure();
  void release_work();
  void finish();

  std::shared_ptr<EngineShared> shared_;
  std::uint64_t tag_ = 0;
  bool notify_ = false;
  std::size_t positions_ = 0;
  std::size_t width_ = 0;
  std::uint64_t reserved_bytes_ = 0;
  std::vector<LayerRows> layers_;
  std::unique_ptr<std::byte[]> arena_;
  std::vector<ReadItem> items_;
  std::vector<std::int32_t> errors_;
  ReadJob job_;
  BatchStats stats_;
  std::optional<RowFailure> failure_;
  std::shared_ptr<Batch> self_;  // while the engine works on it, whatever the caller does
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace engram
