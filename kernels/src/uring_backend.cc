// io_uring: each thread owns a ring, keeps `depth` reads in flight into its own aligned slots, and
// copies the wanted bytes out. Slots stay the kernel's until their read ends, so a caller that goes
// away never leaves a dangling destination to a device.
#include <liburing.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <stdexcept>

#include "backend.h"

namespace engram {
namespace {

constexpr unsigned kDepthMax = 4096;
constexpr unsigned kThreadsDefaultMax = 4;
// Reads taken from the queue at a time; more would starve other jobs, fewer would cost locks.
constexpr std::size_t kClaimItems = 32;
// Completions handled before new reads are submitted.
constexpr unsigned kReapItems = 8;

std::string sentence(const char* call, int error) {
  std::string text = std::string(call) + " failed: " + std::strerror(error);
  switch (error) {
    case EPERM:
      return text +
             " (a seccomp filter, as in container runtimes' default profiles, or "
             "kernel.io_uring_disabled "
             "forbids io_uring)";
    case ENOSYS:
      return text + " (this kernel has no io_uring, or a seccomp filter hides it)";
    case ENOMEM:
      return text + " (locked-memory limit: raise `ulimit -l`, or memory is short)";
    default:
      return text;
  }
}

// Takes the cheapest flags this kernel knows. 0 or the errno.
int set_up_ring(unsigned depth, io_uring& ring, unsigned& flags) {
  // Newest first: deferred task run saves most of the CPU per read, older kernels have less.
  constexpr unsigned kFlagSets[] = {
      IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
      IORING_SETUP_COOP_TASKRUN,
      0,
  };
  int error = 0;
  for (const unsigned set : kFlagSets) {
    flags = set;
    error = -::io_uring_queue_init(depth, &ring, flags);
    if (error != EINVAL) break;
  }
  return error;
}

// The memory reads land in. Deliberately leaked when a ring broke with reads still in flight.
class Slots {
 public:
  explicit Slots(unsigned count) : bytes_(count * kSlotBytes) {
    void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error(sentence("mmap of read buffers", errno));
    memory_ = static_cast<std::byte*>(memory);
  }
  ~Slots() {
    if (memory_ != nullptr) ::munmap(memory_, bytes_);
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  std::byte* at(unsigned slot) const { return memory_ + slot * kSlotBytes; }
  iovec whole() const { return {.iov_base = memory_, .iov_len = bytes_}; }
  void leak() { memory_ = nullptr; }

 private:
  std::size_t bytes_;
  std::byte* memory_ = nullptr;
};

struct InFlight {
  ReadJob* job = nullptr;
  std::size_t index = 0;
  std::uint32_t generation = 0;
  ReadProgress progress;
};

// A ring and its slots; lives on one thread.
class Ring {
 public:
  Ring(ReadContext& context, unsigned depth)
      : context_(context), slots_(depth), in_flight_(depth), depth_(depth) {
    free_.reserve(depth);
    for (unsigned slot = depth; slot-- > 0;) free_.push_back(slot);
    set_up();
    try {
      register_resources();
      prove();
    } catch (...) {
      tear_down();
      throw;
    }
  }

  ~Ring() { tear_down(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  bool files_registered() const { return files_registered_; }
  bool buffers_registered() const { return buffers_registered_; }
  std::size_t in_flight_count() const { return depth_ - free_.size(); }

  // Takes work from the queue and ends it, until the queue stops (returns 0) or the ring does (its
  // errno).
  int run() {
    while (true) {
      if (!fill(true)) return 0;
      if (const int error = submit_and_reap()) return error;
    }
  }

  // Ends or gives back what is in flight after run() failed. The slots stay leaked.
  void abandon(bool give_back, int error) {
    for (InFlight& read : in_flight_) {
      ReadJob* const job = std::exchange(read.job, nullptr);
      if (job == nullptr) continue;
      if (give_back) {
        context_.queue.give_back(job, read.index);
      } else {
        context_.counters.errors.fetch_add(1, std::memory_order_relaxed);
        job->item_done(read.index, error);
      }
    }
  }

 private:
  void tear_down() {
    if (in_flight_count() > 0) slots_.leak();
    ::io_uring_queue_exit(&ring_);
  }

  void set_up() {
    unsigned flags;
    const int error = set_up_ring(depth_, ring_, flags);
    if (error != 0) throw std::runtime_error(sentence("io_uring_setup", error));
  }

  void register_resources() {
    std::vector<int> fds;
    for (const DataFile& file : context_.files) fds.push_back(file.fd());
    files_registered_ =
        ::io_uring_register_files(&ring_, fds.data(), static_cast<unsigned>(fds.size())) == 0;
    const iovec whole = slots_.whole();
    buffers_registered_ = ::io_uring_register_buffers(&ring_, &whole, 1) == 0;
    ::io_uring_register_ring_fd(&ring_);  // saves an fd look-up per enter; harmless when refused
  }

  // One real read of every file: some sandboxes let a ring be set up and then refuse to use it.
  void prove() {
    for (std::uint32_t file = 0; file < context_.files.size(); ++file) {
      if (context_.files[file].size_bytes() == 0) continue;
      std::byte first{};
      const ReadItem item{.offset = 0, .dest = &first, .file = file, .length = 1};
      std::int32_t error = 0;
      ReadJob job;
      job.items = {&item, 1};
      job.errors = {&error, 1};
      job.remaining = 1;
      job.finished = [] {};
      take(job, 0);
      while (job.remaining.load(std::memory_order_relaxed) > 0) {
        if (const int broken = submit_and_reap()) {
          abandon(false, broken);
          throw std::runtime_error(sentence("io_uring_enter", broken));
        }
      }
      if (error != 0) {
        throw std::runtime_error("a test read of " + context_.files[file].path() +
                                 " through the ring failed: " + error_text(error));
      }
    }
  }

  // Puts what the queue has into free slots; with nothing in flight, waits for it if it may. False
  // when there is nothing in flight and nothing came: the queue has stopped.
  bool fill(bool may_wait) {
    while (!free_.empty()) {
      const bool idle = may_wait && in_flight_count() == 0;
      const ReadQueue::Claim claim =
          context_.queue.claim(std::min(free_.size(), kClaimItems), idle);
      if (claim.count == 0) return !idle;
      for (std::size_t i = 0; i < claim.count; ++i) take(*claim.job, claim.first + i);
    }
    return true;
  }

  // Puts one item into a free slot.
  void take(ReadJob& job, std::size_t index) {
    const unsigned slot = free_.back();
    free_.pop_back();
    InFlight& read = in_flight_[slot];
    read.job = &job;
    read.index = index;
    read.progress = ReadProgress{};
    const ReadItem& item = job.items[index];
    read.progress.start(item, context_.files[item.file]);
    prepare(slot);
  }

  void prepare(unsigned slot) {
    InFlight& read = in_flight_[slot];
    const ReadProgress& progress = read.progress;
    const unsigned file = read.job->items[read.index].file;
    // Never null: at most one entry per slot is pending, and the queue has as many entries as there
    // are slots.
    io_uring_sqe* const sqe = ::io_uring_get_sqe(&ring_);
    std::byte* const buffer = slots_.at(slot) + progress.buffer_offset();
    const int fd = files_registered_ ? static_cast<int>(file) : context_.files[file].fd();
    if (buffers_registered_) {
      ::io_uring_prep_read_fixed(sqe, fd, buffer, progress.ask_bytes(), progress.ask_offset(), 0);
    } else {
      ::io_uring_prep_read(sqe, fd, buffer, progress.ask_bytes(), progress.ask_offset());
    }
    if (files_registered_) sqe->flags |= IOSQE_FIXED_FILE;
    ::io_uring_sqe_set_data64(sqe, (std::uint64_t{read.generation} << 32) | slot);
    context_.counters.reads.fetch_add(1, std::memory_order_relaxed);
    context_.counters.read_bytes.fetch_add(progress.ask_bytes(), std::memory_order_relaxed);
  }

  // 0, or the errno that makes the ring unusable.
  int submit_and_reap() {
    if (const int error = unusable(::io_uring_submit_and_wait(&ring_, 1))) return error;
    return reap();
  }

  // Ends what has completed. A long run of completions comes in pieces, with new reads submitted
  // after each, so that the device does not run dry while their rows are copied: at depth 64 that
  // is worth a sixth of the rate.
  int reap() {
    std::array<io_uring_cqe*, kReapItems> cqes;
    while (const unsigned seen = ::io_uring_peek_batch_cqe(&ring_, cqes.data(), kReapItems)) {
      for (unsigned i = 0; i < seen; ++i) {
        complete(::io_uring_cqe_get_data64(cqes[i]), cqes[i]->res);
      }
      ::io_uring_cq_advance(&ring_, seen);
      if (seen < kReapItems) return 0;
      fill(false);
      if (const int error = unusable(::io_uring_submit(&ring_))) return error;
    }
    return 0;
  }

  // What an enter returned, as the errno that makes the ring unusable, or 0. EAGAIN and EBUSY: the
  // kernel is short of requests or completions until some are reaped.
  static int unusable(int result) {
    return result >= 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY ? 0 : -result;
  }

  void complete(std::uint64_t data, int result) {
    const auto slot = static_cast<unsigned>(data & 0xFFFFFFFF);
    InFlight& read = in_flight_[slot];
    if (read.job == nullptr || read.generation != data >> 32)
      return;  // not ours: a stale completion
    ++read.generation;
    DataFile& file = context_.files[read.job->items[read.index].file];
    if (read.progress.advance(result, file) == ReadProgress::Next::again) {
      prepare(slot);
      return;
    }
    ReadJob* const job = std::exchange(read.job, nullptr);
    free_.push_back(slot);
    finish_item(context_, *job, read.index, read.progress, slots_.at(slot));
  }

  ReadContext& context_;
  Slots slots_;
  std::vector<InFlight> in_flight_;
  std::vector<unsigned> free_;
  unsigned depth_;
  io_uring ring_{};
  bool files_registered_ = false;
  bool buffers_registered_ = false;
};

class UringBackend final : public Backend {
 public:
  UringBackend(ReadContext& context, const BackendOptions& options, RingFailed ring_failed)
      : context_(context), ring_failed_(std::move(ring_failed)), threads_(context.queue) {
    const unsigned depth = std::clamp(options.depth, 1u, kDepthMax);
    unsigned threads = options.threads;
    if (threads == 0) {
      threads = context.files.empty() ? 1 : hardware_queues(context.files.front().path());
      threads = std::min(threads, kThreadsDefaultMax);
    }
    threads = std::min(threads, depth);
    // A ring belongs to the thread that sets it up, so set-up errors come back through a promise.
    for (unsigned i = 0; i < threads; ++i) {
      std::promise<std::string> set_up;
      std::future<std::string> registered = set_up.get_future();
      threads_.start([this, share = depth / threads + (i < depth % threads ? 1 : 0), i,
                      promise = std::move(set_up)]() mutable { work(share, i, promise); });
      registered_ = registered.get();
    }
  }

  unsigned threads() const override { return threads_.count(); }
  std::string registered() const override { return registered_; }

 private:
  void work(unsigned depth, unsigned number, std::promise<std::string>& set_up) {
    ::pthread_setname_np(::pthread_self(), ("engram-io-" + std::to_string(number)).c_str());
    std::unique_ptr<Ring> ring;
    try {
      ring = std::make_unique<Ring>(context_, depth);
    } catch (...) {
      set_up.set_exception(std::current_exception());
      return;
    }
    set_up.set_value(ring->files_registered() && ring->buffers_registered() ? "files+buffers"
                     : ring->files_registered()                             ? "files"
                     : ring->buffers_registered()                           ? "buffers"
                                                                            : "none");
    const int error = ring->run();
    if (error == 0) return;
    const bool taken_over = ring_failed_(sentence("io_uring_enter", error));
    ring->abandon(taken_over, error);
    ring.reset();
    // Nobody else will: fail what comes, so that no request waits for ever.
    while (!taken_over) {
      const ReadQueue::Claim claim = context_.queue.claim(kClaimItems, true);
      if (claim.count == 0) return;
      context_.counters.errors.fetch_add(claim.count, std::memory_order_relaxed);
      for (std::size_t i = 0; i < claim.count; ++i) claim.job->item_done(claim.first + i, error);
    }
  }

  ReadContext& context_;
  RingFailed ring_failed_;
  std::string registered_;
  IoThreads threads_;
};

}  // namespace

RingProbe probe_ring() {
  io_uring ring;
  RingProbe probe;
  probe.error = set_up_ring(8, ring, probe.flags);
  if (probe.error == 0) {
    ::io_uring_queue_exit(&ring);
  } else {
    probe.reason = sentence("io_uring_setup", probe.error);
    probe.flags = 0;
  }
  return probe;
}

std::unique_ptr<Backend> make_uring_backend(ReadContext& context, const BackendOptions& options,
                                            RingFailed ring_failed) {
  return std::make_unique<UringBackend>(context, options, std::move(ring_failed));
}

}  // namespace engram
