// io_uring: each thread owns a ring, keeps `depth` reads in flight into its own aligned slots, and
// copies the wanted bytes out. Slots stay the kernel's until their read ends, so a caller that goes
// away never leaves a dangling destination to a device.
#include <liburing.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <stdexcept>

#include "backend.h"
#include "row_output.h"

namespace engram {
namespace {

constexpr unsigned kDepthMax = 4096;
constexpr unsigned kThreadsDefaultMax = 4;
// Reads taken from the queue at a time.
constexpr std::size_t kClaimReads = 32;
// Completions handled before new reads are submitted.
constexpr unsigned kReapReads = 8;
// With so many reads in flight, so many completions are waited for at once: each saves a call, and
// the device has more than enough to do meanwhile.
constexpr std::size_t kWaitDeep = 32;
constexpr unsigned kWaitReads = 4;
// What the completion of the wake-up poll says it is; no slot has this number.
constexpr std::uint64_t kWakeUp = 0xFFFFFFFF;
static_assert(kDepthMax < kWakeUp);

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
  Claimed claimed;  // no source: the slot is free
  std::uint32_t generation = 0;
  ReadProgress progress;
};

// A descriptor that the queue writes to when there is work for a ring that sleeps.
class WakeUp {
 public:
  explicit WakeUp(ReadQueue& queue) : queue_(queue) {
    sleeper_.event_fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (sleeper_.event_fd < 0) throw std::runtime_error(sentence("eventfd", errno));
    queue_.add(sleeper_);
  }
  ~WakeUp() {
    queue_.remove(sleeper_);
    ::close(sleeper_.event_fd);
  }
  WakeUp(const WakeUp&) = delete;
  WakeUp& operator=(const WakeUp&) = delete;

  Sleeper* sleeper() { return &sleeper_; }
  int fd() const { return sleeper_.event_fd; }
  void drain() const {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(sleeper_.event_fd, &count, sizeof count);
  }

 private:
  ReadQueue& queue_;
  Sleeper sleeper_;
};

// A ring and its slots; lives on one thread.
class Ring {
 public:
  Ring(ReadContext& context, unsigned depth)
      : context_(context),
        slots_(depth),
        in_flight_(depth),
        depth_(depth),
        wake_up_(context.queue) {
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
      fill();
      // Asked after the claim: what came before it has been taken, and nothing comes later.
      if (in_flight_count() == 0 && context_.queue.stopped()) return 0;
      if (const int error = submit_and_reap()) return error;
    }
  }

  // Ends or gives back what is in flight after run() failed. The slots stay leaked.
  void abandon(bool give_back, int error) {
    for (InFlight& read : in_flight_) {
      const Claimed claimed = std::exchange(read.claimed, {});
      if (claimed.source == nullptr) continue;
      if (give_back) {
        context_.queue.ended(claimed);
        context_.queue.give_back(claimed);
      } else {
        fail_read(context_, claimed, error);
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
    const int error = set_up_ring(depth_ + 1, ring_, flags);  // and the wake-up poll
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
      TestRead test;
      context_.devices.started(file, Lane::decode);
      take({.source = &test,
            .read = {.offset = 0, .file = file, .length = 1},
            .claimed_ns = now_ns()});
      while (!test.over) {
        if (const int broken = submit_and_reap()) {
          abandon(false, broken);
          throw std::runtime_error(sentence("io_uring_enter", broken));
        }
      }
      if (test.error != 0) {
        throw std::runtime_error("a test read of " + context_.files[file].path() +
                                 " through the ring failed: " + error_text(test.error));
      }
    }
    proven_ = true;
  }

  struct TestRead final : ReadSource {
    std::size_t next(std::span<Read>, Room&) override { return 0; }
    bool exhausted() const override { return true; }
    void ended(const Read&, std::int32_t failed, const std::byte*) override {
      error = failed;
      over = true;
    }
    std::int32_t error = 0;
    bool over = false;
  };

  // Puts what the queue has into free slots.
  void fill() {
    std::array<Claimed, kClaimReads> claimed;
    while (proven_ && !free_.empty()) {
      const auto room = std::span(claimed).first(std::min(free_.size(), kClaimReads));
      const std::size_t count = context_.queue.claim(room, wake_up_.sleeper());
      for (const Claimed& one : room.first(count)) take(one);
      if (count < room.size()) return;
    }
  }

  // Puts one read into a free slot.
  void take(const Claimed& claimed) {
    const unsigned slot = free_.back();
    free_.pop_back();
    InFlight& read = in_flight_[slot];
    read.claimed = claimed;
    read.progress = ReadProgress{};
    read.progress.start(claimed.read, context_.files[claimed.read.file]);
    prepare(slot);
  }

  void prepare(unsigned slot) {
    InFlight& read = in_flight_[slot];
    const ReadProgress& progress = read.progress;
    const unsigned file = read.claimed.read.file;
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
    if (proven_ && !wake_up_armed_) {
      io_uring_sqe* const sqe = ::io_uring_get_sqe(&ring_);
      ::io_uring_prep_poll_add(sqe, wake_up_.fd(), POLLIN);
      ::io_uring_sqe_set_data64(sqe, kWakeUp);
      wake_up_armed_ = true;
    }
    const unsigned wait = in_flight_count() >= kWaitDeep ? kWaitReads : 1;
    if (const int error = unusable(::io_uring_submit_and_wait(&ring_, wait))) return error;
    return reap();
  }

  // Ends what has completed. A long run of completions comes in pieces, with new reads submitted
  // after each, so that the device does not run dry while their rows are copied: at depth 64 that
  // is worth a sixth of the rate.
  int reap() {
    std::array<io_uring_cqe*, kReapReads> cqes;
    while (const unsigned seen = ::io_uring_peek_batch_cqe(&ring_, cqes.data(), kReapReads)) {
      const std::int64_t now = now_ns();
      for (unsigned i = 0; i < seen; ++i) fetch(::io_uring_cqe_get_data64(cqes[i]));
      for (unsigned i = 0; i < seen; ++i) {
        complete(::io_uring_cqe_get_data64(cqes[i]), cqes[i]->res, now);
      }
      ::io_uring_cq_advance(&ring_, seen);
      if (seen < kReapReads) return 0;
      fill();
      if (const int error = unusable(::io_uring_submit(&ring_))) return error;
    }
    return 0;
  }

  // Hint for complete(): the bytes that a device has written are in nobody's caches. Inlined
  // always, see prefetch_bytes.
  [[gnu::always_inline]] void fetch(std::uint64_t data) const {
    if (data == kWakeUp) return;
    const auto slot = static_cast<unsigned>(data & 0xFFFFFFFF);
    const InFlight& read = in_flight_[slot];
    prefetch_bytes(slots_.at(slot) + read.progress.head(), read.claimed.read.length);
  }

  // What an enter returned, as the errno that makes the ring unusable, or 0. EAGAIN and EBUSY: the
  // kernel is short of requests or completions until some are reaped.
  static int unusable(int result) {
    return result >= 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY ? 0 : -result;
  }

  void complete(std::uint64_t data, int result, std::int64_t now) {
    if (data == kWakeUp) {
      wake_up_.drain();
      wake_up_armed_ = false;
      return;
    }
    const auto slot = static_cast<unsigned>(data & 0xFFFFFFFF);
    InFlight& read = in_flight_[slot];
    if (read.claimed.source == nullptr || read.generation != data >> 32)
      return;  // not ours: a stale completion
    ++read.generation;
    DataFile& file = context_.files[read.claimed.read.file];
    if (read.progress.advance(result, file) == ReadProgress::Next::again) {
      prepare(slot);
      return;
    }
    const Claimed claimed = std::exchange(read.claimed, {});
    free_.push_back(slot);
    finish_read(context_, claimed, read.progress, slots_.at(slot), now);
  }

  ReadContext& context_;
  Slots slots_;
  std::vector<InFlight> in_flight_;
  std::vector<unsigned> free_;
  unsigned depth_;
  io_uring ring_{};
  WakeUp wake_up_;
  bool wake_up_armed_ = false;
  bool proven_ = false;
  bool files_registered_ = false;
  bool buffers_registered_ = false;
};

class UringBackend final : public Backend {
 public:
  UringBackend(ReadContext& context, const BackendOptions& options, RingFailed ring_failed)
      : context_(context), ring_failed_(std::move(ring_failed)), threads_(context.queue) {
    // Any ring may hold all that the devices take: which one does is the queue's to say.
    const std::size_t reads = options.depth * context.devices.count();
    const auto depth = static_cast<unsigned>(std::clamp<std::size_t>(reads, 1, kDepthMax));
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
      threads_.start(
          [this, depth, i, promise = std::move(set_up)]() mutable { work(depth, i, promise); });
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
    Claimed claimed;
    while (!taken_over && context_.queue.wait_and_claim({&claimed, 1}) > 0) {
      fail_read(context_, claimed, error);
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
