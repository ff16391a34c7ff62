// What every reader backend is: threads that take reads from one queue and end each of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "files.h"
#include "read_queue.h"

namespace engram {

// Totals since start, over all threads and backends of a reader.
struct ReadCounters {
  std::atomic<std::uint64_t> reads{0};         // asked of the kernel, retries included
  std::atomic<std::uint64_t> read_bytes{0};    // that those asked for
  std::atomic<std::uint64_t> needed_bytes{0};  // that items wanted
  std::atomic<std::uint64_t> short_reads{0};
  std::atomic<std::uint64_t> retries{0};
  std::atomic<std::uint64_t> errors{0};     // items that failed
  std::atomic<std::uint64_t> truncated{0};  // of these: the file ends before they do
};

// Shared by the threads of a reader. Outlives every backend.
struct ReadContext {
  ReadContext(std::vector<DataFile> opened, unsigned depth, unsigned bulk_depth)
      : files(std::move(opened)),
        devices(files, depth, bulk_depth),
        metrics(files.size()),
        queue(devices, metrics) {}

  std::vector<DataFile> files;
  Devices devices;
  ReadMetrics metrics;
  ReadQueue queue;
  ReadCounters counters;
};

// The threads of a backend. Stops the queue and joins them.
class IoThreads {
 public:
  explicit IoThreads(ReadQueue& queue) : queue_(queue) {}
  ~IoThreads() {
    queue_.stop();
    for (std::thread& thread : threads_) thread.join();
  }
  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;

  template <typename Work>
  void start(Work work) {
    threads_.emplace_back(std::move(work));
  }
  unsigned count() const { return static_cast<unsigned>(threads_.size()); }

 private:
  ReadQueue& queue_;
  std::vector<std::thread> threads_;
};

class Backend {
 public:
  virtual ~Backend() = default;  // stops the queue and joins its threads
  virtual unsigned threads() const = 0;
  virtual std::string registered() const { return "none"; }
};

// Reads in flight (io_uring) or threads that block in a read (pread, mmap).
struct BackendOptions {
  unsigned depth = 64;   // per device
  unsigned threads = 0;  // 0 = the backend's default
};

// What happens to reads when a ring stops working while serving: called once per ring, on its
// thread, with the reason. True = someone else takes over its reads; false = they fail.
using RingFailed = std::function<bool(const std::string& reason)>;

// Each throws std::runtime_error with a sentence when the backend cannot run here, after a real
// test read.
std::unique_ptr<Backend> make_uring_backend(ReadContext&, const BackendOptions&, RingFailed);
std::unique_ptr<Backend> make_pread_backend(ReadContext&, const BackendOptions&);
std::unique_ptr<Backend> make_mmap_backend(ReadContext&, const BackendOptions&);

// Whether this process may have a ring, set up with the flags the backend uses.
struct RingProbe {
  int error = 0;  // 0 or the errno of io_uring_setup
  std::string reason{};
  unsigned flags = 0;  // IORING_SETUP_*
};
RingProbe probe_ring();

// What every read that ends is counted by. `now`: when it ended.
inline void count_end(ReadContext& context, const Claimed& claimed, std::int32_t error,
                      std::int64_t now) {
  const Read& read = claimed.read;
  context.metrics.device(read.file, read.table, claimed.lane).add(now - claimed.claimed_ns);
  if (error != 0) context.counters.errors.fetch_add(1, std::memory_order_relaxed);
  if (error == kErrorTruncated) context.counters.truncated.fetch_add(1, std::memory_order_relaxed);
  context.queue.ended(claimed);
}

// Ends a read whose bytes lie in `buffer` as `progress` says.
inline void finish_read(ReadContext& context, const Claimed& claimed, const ReadProgress& progress,
                        const std::byte* buffer, std::int64_t now) {
  ReadCounters& counters = context.counters;
  constexpr auto relaxed = std::memory_order_relaxed;
  counters.needed_bytes.fetch_add(claimed.read.length, relaxed);
  if (progress.was_short()) counters.short_reads.fetch_add(1, relaxed);
  if (progress.retries() != 0) counters.retries.fetch_add(progress.retries(), relaxed);
  count_end(context, claimed, progress.error(), now);
  claimed.source->ended(claimed.read, progress.error(), buffer + progress.head());
}

// The same for a read that cannot be made.
inline void fail_read(ReadContext& context, const Claimed& claimed, std::int32_t error) {
  count_end(context, claimed, error, now_ns());
  claimed.source->ended(claimed.read, error, nullptr);
}

}  // namespace engram
