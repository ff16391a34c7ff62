// pread: a pool of threads, each blocked in one read. The fallback that runs everywhere.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "backend.h"

namespace engram {
namespace {

constexpr unsigned kThreadsMax = 256;

class PreadBackend final : public Backend {
 public:
  PreadBackend(ReadContext& context, const BackendOptions& options)
      : context_(context), threads_(context.queue) {
    const unsigned reads = options.depth * static_cast<unsigned>(context.devices.count());
    const unsigned wanted = options.threads != 0 ? options.threads : reads;
    const unsigned threads = std::clamp(wanted, 1u, kThreadsMax);
    for (unsigned i = 0; i < threads; ++i) threads_.start([this] { work(); });
  }

  unsigned threads() const override { return threads_.count(); }

 private:
  void work() {
    ::pthread_setname_np(::pthread_self(), "engram-pread");
    alignas(kAlignmentMax) std::byte buffer[kSlotBytes];
    Claimed claimed;
    while (context_.queue.wait_and_claim({&claimed, 1}) > 0) read(claimed, buffer);
  }

  void read(const Claimed& claimed, std::byte* buffer) {
    DataFile& file = context_.files[claimed.read.file];
    ReadProgress progress;
    progress.start(claimed.read, file);
    ReadProgress::Next next;
    do {
      context_.counters.reads.fetch_add(1, std::memory_order_relaxed);
      context_.counters.read_bytes.fetch_add(progress.ask_bytes(), std::memory_order_relaxed);
      const ssize_t got = ::pread(file.fd(), buffer + progress.buffer_offset(),
                                  progress.ask_bytes(), static_cast<off_t>(progress.ask_offset()));
      next = progress.advance(got < 0 ? -errno : got, file);
    } while (next == ReadProgress::Next::again);
    finish_read(context_, claimed, progress, buffer, now_ns());
  }

  ReadContext& context_;
  IoThreads threads_;
};

}  // namespace

std::unique_ptr<Backend> make_pread_backend(ReadContext& context, const BackendOptions& options) {
  return std::make_unique<PreadBackend>(context, options);
}

}  // namespace engram
