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
constexpr std::size_t kClaimItems = 16;

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

  bool covers(const ReadItem& item) const {
    return item.offset <= bytes_ && item.length <= bytes_ - item.offset;
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
      const ReadItem item{
          .offset = 0, .dest = &first, .file = static_cast<std::uint32_t>(i), .length = 1};
      if (!mappings_[i].covers(item)) continue;
      if (const int error = copy(item); error != 0) {
        throw std::runtime_error("a test read through process_vm_readv failed: " +
                                 error_text(error));
      }
    }
  }

  void work() {
    ::pthread_setname_np(::pthread_self(), "engram-mmap");
    while (true) {
      const ReadQueue::Claim claim = context_.queue.claim(kClaimItems, true);
      if (claim.count == 0) return;
      const auto items = claim.job->items.subspan(claim.first, claim.count);
      for (const ReadItem& item : items) read_ahead(item);
      for (std::size_t i = 0; i < items.size(); ++i) {
        const std::int32_t error = copy(items[i]);
        count(items[i], error);
        claim.job->item_done(claim.first + i, error);
      }
    }
  }

  void read_ahead(const ReadItem& item) const {
    const Mapping& mapping = mappings_[item.file];
    if (!mapping.covers(item)) return;
    const std::uint64_t begin = item.offset / page_bytes_ * page_bytes_;
    ::madvise(mapping.at(begin), item.offset + item.length - begin, MADV_WILLNEED);
  }

  std::int32_t copy(const ReadItem& item) const {
    const Mapping& mapping = mappings_[item.file];
    if (!mapping.covers(item)) return kErrorTruncated;
    const iovec from{.iov_base = mapping.at(item.offset), .iov_len = item.length};
    const iovec to{.iov_base = item.dest, .iov_len = item.length};
    const ssize_t got = ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0);
    const int error = got < 0 ? errno : EFAULT;
    // The last page of a truncated file reads as zeros beyond its end, so the size decides, after
    // the copy.
    struct stat now{};
    if (::fstat(context_.files[item.file].fd(), &now) != 0) return errno;
    if (static_cast<std::uint64_t>(now.st_size) < item.offset + item.length) return kErrorTruncated;
    if (got == static_cast<ssize_t>(item.length)) return 0;
    return error == EFAULT ? EIO : error;
  }

  void count(const ReadItem& item, std::int32_t error) {
    constexpr auto relaxed = std::memory_order_relaxed;
    ReadCounters& counters = context_.counters;
    counters.reads.fetch_add(1, relaxed);
    counters.read_bytes.fetch_add(item.length, relaxed);
    counters.needed_bytes.fetch_add(item.length, relaxed);
    if (error != 0) counters.errors.fetch_add(1, relaxed);
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
