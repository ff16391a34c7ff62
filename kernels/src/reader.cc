#include "reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <stdexcept>

namespace engram {
namespace {

std::vector<DataFile> open_files(std::vector<std::string> paths) {
  std::vector<DataFile> files;
  files.reserve(paths.size());
  for (std::string& path : paths) files.emplace_back(std::move(path));
  return files;
}

ReaderOptions complete(ReaderOptions options) {
  if (options.depth == 0) throw std::invalid_argument("the reader's depth must be at least 1");
  if (options.bulk_depth > options.depth) {
    throw std::invalid_argument("bulk lanes cannot have more reads in flight (" +
                                std::to_string(options.bulk_depth) + ") than the device (" +
                                std::to_string(options.depth) + ")");
  }
  if (options.bulk_depth == 0) options.bulk_depth = std::max(1u, options.depth * 3 / 4);
  return options;
}

// The items of one call, and who waits for them.
class ItemReads final : public ReadSource {
 public:
  ItemReads(std::span<const ReadItem> items, std::span<std::int32_t> errors)
      : items_(items), errors_(errors), remaining_(items.size() + 1) {}  // and the queue

  std::size_t next(std::span<Read> out, Room& room) override {
    std::size_t count = 0;
    for (; count < out.size() && at_ < items_.size(); ++count, ++at_) {
      const ReadItem& item = items_[at_];
      if (!room.take(item.file)) break;
      out[count] = {.offset = item.offset,
                    .file = item.file,
                    .length = static_cast<std::uint16_t>(item.length),
                    .tag = at_};
    }
    return count;
  }
  bool exhausted() const override { return at_ == items_.size(); }
  void left_queue() override { one_done(); }
  void ended(const Read& read, std::int32_t error, const std::byte* bytes) override {
    if (error == 0) std::memcpy(items_[read.tag].dest, bytes, read.length);
    errors_[read.tag] = error;
    one_done();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return done_; });
  }

 private:
  void one_done() {
    if (remaining_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::lock_guard lock(mutex_);
    done_ = true;
    wake_.notify_one();
  }

  std::span<const ReadItem> items_;
  std::span<std::int32_t> errors_;
  std::size_t at_ = 0;
  std::atomic<std::size_t> remaining_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
};

}  // namespace

Reader::Reader(std::vector<std::string> paths, ReaderOptions options)
    : options_(complete(std::move(options))),
      pid_(::getpid()),
      context_(open_files(std::move(paths)), options_.depth, options_.bulk_depth) {
  start();
}

Reader::~Reader() { close(); }

void Reader::start() {
  const BackendOptions options{.depth = options_.depth, .threads = options_.threads};
  const std::string& wanted = options_.backend;
  const std::lock_guard lock(mutex_);
  if (wanted == "io_uring" || wanted == "auto") {
    try {
      backends_.push_back(make_uring_backend(context_, options, [this](const std::string& reason) {
        return take_over_from_ring(reason);
      }));
      state_ = {.backend = "io_uring",
                .reason = wanted == "auto" ? "a ring was set up and read from the table"
                                           : "asked for by name"};
    } catch (const std::runtime_error& error) {
      if (wanted != "auto") {
        throw std::runtime_error(std::string("backend io_uring cannot run here: ") + error.what());
      }
      context_.queue.start();
      backends_.push_back(make_pread_backend(context_, options));
      state_ = {.backend = "pread",
                .reason = std::string("io_uring refused: ") + error.what(),
                .fallback = true};
    }
  } else if (wanted == "pread") {
    backends_.push_back(make_pread_backend(context_, options));
    state_ = {.backend = "pread", .reason = "asked for by name"};
  } else if (wanted == "mmap") {
    try {
      backends_.push_back(make_mmap_backend(context_, options));
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(std::string("backend mmap cannot run here: ") + error.what());
    }
    state_ = {.backend = "mmap", .reason = "asked for by name"};
  } else {
    throw std::invalid_argument("unknown backend '" + wanted +
                                "'; known: auto, io_uring, pread, mmap");
  }
  state_.threads = backends_.back()->threads();
  state_.registered = backends_.back()->registered();
}

// On a ring's thread, when io_uring_enter fails for good. Under `auto` a pread pool takes over,
// loudly.
bool Reader::take_over_from_ring(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (options_.backend != "auto") {
    state_.reason = "BROKEN: " + reason + "; reads fail until the files are opened anew";
    state_.broken = true;
    return false;
  }
  if (state_.backend != "io_uring") return true;  // another ring's thread was first
  if (state_.broken) return false;                // and found no way out
  try {
    backends_.push_back(make_pread_backend(context_, {.depth = options_.depth, .threads = 0}));
  } catch (const std::exception& error) {
    state_.reason = "BROKEN: " + reason + "; pread could not take over: " + error.what();
    state_.broken = true;
    // The pool that failed to come up stopped the queue for its threads; the ring's goes on, to
    // fail what comes.
    if (!closed_) context_.queue.start();
    return false;
  }
  state_ = {.backend = "pread",
            .reason = "io_uring broke while serving: " + reason,
            .fallback = true,
            .threads = backends_.back()->threads(),
            .registered = backends_.back()->registered()};
  return true;
}

void Reader::submit(ReadSource& source, Lane lane) {
  if (::getpid() != pid_) {
    throw std::runtime_error(
        "the reader was opened before a fork and its threads are the parent's; "
        "open the files again in this process");
  }
  // Pushed under the lock: after close() the queue has nobody to claim from it.
  const std::lock_guard lock(mutex_);
  if (closed_) throw std::runtime_error("the reader is closed");
  context_.queue.push(source, lane);
}

void Reader::read(std::span<const ReadItem> items, std::span<std::int32_t> errors) {
  if (items.empty()) return;
  ItemReads reads(items, errors);
  submit(reads, Lane::decode);
  reads.wait();
}

void Reader::close() {
  if (::getpid() != pid_) return;  // the threads are the parent's
  const std::lock_guard closing(closing_);
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  context_.queue.stop();
  // Joins outside the lock: a ring that breaks now may still call take_over_from_ring().
  for (std::size_t i = 0;; ++i) {
    std::unique_ptr<Backend> backend;
    {
      const std::lock_guard lock(mutex_);
      if (i >= backends_.size()) break;
      backend = std::move(backends_[i]);
    }
    backend.reset();
  }
  // A ring that broke meanwhile may have given reads back after the pool that took over had left.
  Claimed claimed;
  while (context_.queue.claim({&claimed, 1}, nullptr) > 0) {
    fail_read(context_, claimed, ECANCELED);
  }
  const std::lock_guard lock(mutex_);
  backends_.clear();
}

std::string Reader::change() const {
  for (const DataFile& file : context_.files) {
    if (std::string change = file.change(); !change.empty()) return change;
  }
  return {};
}

ReaderState Reader::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

}  // namespace engram
