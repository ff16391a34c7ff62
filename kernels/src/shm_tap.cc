#include "shm_tap.h"

#include <new>
#include <utility>

namespace engram::shm {
namespace {

// What a request takes beside its keys, about.
constexpr std::uint64_t kNotedBytes = 512;
// The same of a sequence, which may be empty: what a recorder makes of it.
constexpr std::uint64_t kSequenceBytes = 256;

}  // namespace

void Tap::note(std::int64_t at_ns, Lane lane, const Entry& entry,
               const std::shared_ptr<const Request>& request) noexcept {
  const std::uint64_t allowed = allowed_bytes_.load();
  if (allowed == 0) return;
  const std::uint64_t bytes =
      kNotedBytes + kSequenceBytes * entry.sequences + request->held_bytes();
  bool kept = false;
  const bool fits = waiting_bytes_->fetch_add(bytes) + bytes <= allowed;
  const std::lock_guard lock(mutex_);
  try {
    // Made first: from then on the bytes are given back by whoever drops it.
    std::shared_ptr<const void> room(
        nullptr, [waiting = waiting_bytes_, bytes](const void*) { waiting->fetch_sub(bytes); });
    if (fits) {
      waiting_.noted.push_back({.at_ns = at_ns,
                                .lane = lane,
                                .entry = entry,
                                .request = request,
                                .room = std::move(room)});
      kept = true;
    }
  } catch (const std::bad_alloc&) {
    // The lookup does not fail for the sake of its trace.
  }
  if (!kept) ++waiting_.missing;
}

Tap::Taken Tap::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(waiting_, {});
}

}  // namespace engram::shm
