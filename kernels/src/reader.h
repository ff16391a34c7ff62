// Batched random reads from a fixed set of files, by whichever backend runs here.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend.h"

namespace engram {

struct ReaderOptions {
  // io_uring, pread, mmap, or auto: io_uring when a real test read succeeds, else pread.
  std::string backend = "auto";
  // Reads in flight on each device, all threads together. Deep enough for its IOPS; deeper only
  // adds latency.
  unsigned depth = 64;
  // Of these, what the bulk lanes may hold; 0 = three quarters.
  unsigned bulk_depth = 0;
  // 0: io_uring one per hardware queue (at most 4), pread one per read in flight, mmap 16.
  unsigned threads = 0;
};

// What serves the reads now, and why. Changes at most once: when a ring breaks while it serves.
struct ReaderState {
  std::string backend;
  std::string reason;
  bool fallback = false;
  bool broken = false;  // no backend works: reads fail
  unsigned threads = 0;
  std::string registered{};
};

// A read into memory of the caller's.
struct ReadItem {
  std::uint64_t offset;
  std::byte* dest;
  std::uint32_t file;
  std::uint32_t length;
};

class Reader {
 public:
  // Throws std::system_error for a file that cannot be read, std::runtime_error when the backend
  // asked for by name cannot run here, std::invalid_argument for an unknown one.
  Reader(std::vector<std::string> paths, ReaderOptions options);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Starts to read what a source has: 1 to kReadBytesMax bytes each, at up to kOffsetMax of a file
  // that exists. Never blocks. The source must live until it has left the queue and all its reads
  // have ended. Throws std::runtime_error once closed, or in a forked child.
  void submit(ReadSource& source, Lane lane);
  // The same from within ReadSource::ended(), closed or not: the thread that ends a read comes back
  // for more before it goes. Without the reader's lock, whose holder may wait for that thread.
  void submit_more(ReadSource& source, Lane lane) { context_.queue.push(source, lane); }
  // Reads items to their end on the calling thread's time, in the decode lane; one error each.
  void read(std::span<const ReadItem> items, std::span<std::int32_t> errors);
  // Waits for reads in flight and stops the threads; submit() then throws. Any thread may call it,
  // any number of times; each call returns when all is closed.
  void close();

  ReaderState state() const;
  unsigned depth() const { return options_.depth; }
  unsigned bulk_depth() const { return options_.bulk_depth; }
  const std::vector<DataFile>& files() const { return context_.files; }
  // The first change of a file since it was opened, as a sentence; empty: none.
  std::string change() const;
  const ReadCounters& counters() const { return context_.counters; }
  const ReadMetrics& metrics() const { return context_.metrics; }
  // Of the device that holds a file, all lanes.
  unsigned in_flight(std::uint32_t file) const { return context_.devices.in_flight(file); }

 private:
  void start();
  bool take_over_from_ring(const std::string& reason);

  ReaderOptions options_;
  pid_t pid_;
  ReadContext context_;
  std::mutex closing_;        // held by close() throughout
  mutable std::mutex mutex_;  // guards what follows
  ReaderState state_;
  std::vector<std::unique_ptr<Backend>> backends_;  // the running one last
  bool closed_ = false;
};

}  // namespace engram
