// mmap: the page cache's own memory, copied out with process_vm_readv so that a page that cannot be
// had is an EFAULT of ours and never a SIGBUS. Good when the table mostly fits in the page cache.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "backend.h"

namespace engram {
namespace {

constexpr unsigned kThreadsDefault = 16;
constexpr unsigned kThreadsMax = 256;
// Read-ahead is asked for this many rows at once before the first is copied.
constexpr std::size_t kClaimReads = 16;

class Mapping {
 public:
  explicit Mapping(const DataFile& file) : bytes_(file.size_bytes()) {
    if (bytes_ == 0) return;
    void* const memory = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.fd(), 0);
    if (memory == MAP_FAILED) {
      throw std::runtime_error("mmap of " + file.path() + " failed: " + std::strerror(errno));
    }
    memory_ = static_cast<std::byte*>(memory);
    ::madvise(memory_, bytes_, MADV_RANDOM);
  }
  ~Mapping() {
    if (memory_ != nullptr) ::munmap(memory_, bytes_);
  }
  Mapping(Mapping&& other) noexcept
      : bytes_(other.bytes_), memory_(std::exchange(other.memory_, nullptr)) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping& operator=(Mapping&&) = delete;

  bool covers(const Read& read) const {
    return read.offset <= bytes_ && read.length <= bytes_ - read.offset;
  }
  std::byte* at(std::uint64_t offset) const { return memory_ + offset; }

 private:
  std::uint64_t bytes_;
  std::byte* memory_ = nullptr;
};

class MmapBackend final : public Backend {
 public:
  MmapBackend(ReadContext& context, const BackendOptions& options)
      : context_(context),
        page_bytes_(static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))),
        threads_(context.queue) {
    for (const DataFile& file : context.files) mappings_.emplace_back(file);
    prove();
    // A thread's reads wait for each other: only one of them at a time is the device's.
    context.devices.raise_depth(kClaimReads);
    const unsigned wanted = options.threads != 0 ? options.threads : kThreadsDefault;
    for (unsigned i = 0; i < std::clamp(wanted, 1u, kThreadsMax); ++i) {
      threads_.start([this] { work(); });
    }
  }

  unsigned threads() const override { return threads_.count(); }

 private:
  void prove() {
    for (std::size_t i = 0; i < mappings_.size(); ++i) {
      std::byte first{};
      const Read read{.offset = 0, .file = static_cast<std::uint32_t>(i), .length = 1};
      if (!mappings_[i].covers(read)) continue;
      if (const int error = copy(read, &first); error != 0) {
        throw std::runtime_error("a test read through process_vm_readv failed: " +
                                 error_text(error));
      }
    }
  }

  void work() {
    ::pthread_setname_np(::pthread_self(), "engram-mmap");
    std::array<Claimed, kClaimReads> claimed;
    std::array<std::byte, kReadBytesMax> bytes;
    while (const std::size_t count = context_.queue.wait_and_claim(claimed)) {
      const auto reads = std::span(claimed).first(count);
      for (const Claimed& read : reads) read_ahead(read.read);
      for (Claimed& read : reads) {
        read.claimed_ns = now_ns();  // those before it were not its own time
        const std::int32_t error = copy(read.read, bytes.data());
        count_read(read.read);
        count_end(context_, read, error, now_ns());
        read.source->ended(read.read, error, bytes.data());
      }
    }
  }

  void read_ahead(const Read& read) const {
    const Mapping& mapping = mappings_[read.file];
    if (!mapping.covers(read)) return;
    const std::uint64_t begin = read.offset / page_bytes_ * page_bytes_;
    ::madvise(mapping.at(begin), read.offset + read.length - begin, MADV_WILLNEED);
  }

  std::int32_t copy(const Read& read, std::byte* out) const {
    const Mapping& mapping = mappings_[read.file];
    if (!mapping.covers(read)) return kErrorTruncated;
    const iovec from{.iov_base = mapping.at(read.offset), .iov_len = read.length};
    const iovec to{.iov_base = out, .iov_len = read.length};
    const ssize_t got = ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0);
    const int error = got < 0 ? errno : EFAULT;
    // The last page of a truncated file reads as zeros beyond its end, so the size decides, after
    // the copy.
    struct stat now{};
    if (::fstat(context_.files[read.file].fd(), &now) != 0) return errno;
    if (static_cast<std::uint64_t>(now.st_size) < read.offset + read.length) return kErrorTruncated;
    if (got == static_cast<ssize_t>(read.length)) return 0;
    return error == EFAULT ? EIO : error;
  }

  void count_read(const Read& read) {
    constexpr auto relaxed = std::memory_order_relaxed;
    ReadCounters& counters = context_.counters;
    counters.reads.fetch_add(1, relaxed);
    counters.read_bytes.fetch_add(read.length, relaxed);
    counters.needed_bytes.fetch_add(read.length, relaxed);
  }

  ReadContext& context_;
  std::uint64_t page_bytes_;
  std::vector<Mapping> mappings_;
  IoThreads threads_;
};

}  // namespace

std::unique_ptr<Backend> make_mmap_backend(ReadContext& context, const BackendOptions& options) {
  return std::make_unique<MmapBackend>(context, options);
}

}  // namespace engram
