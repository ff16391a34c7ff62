// The memory file of one client: made and sealed by the server, mapped by both.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "shm_layout.h"
#include "unique_fd.h"

namespace engram::shm {

class Memory {
 public:
  // A new file with so large a data area, all its pages allocated; it can neither shrink nor grow,
  // so that no access to it ever faults. Throws std::system_error.
  static Memory create(std::uint64_t data_bytes);
  // Maps a file received from a server. Throws std::system_error, and std::runtime_error when it is
  // not sealed, or not what the welcome says.
  static Memory map(UniqueFd fd, std::uint64_t file_bytes);

  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory& operator=(Memory&&) = delete;

  // Its descriptor, once; the mapping needs none.
  UniqueFd take_fd() { return std::move(fd_); }
  std::uint64_t file_bytes() const { return bytes_; }
  std::span<std::byte> data() const {
    return {base_ + kDataOffset, static_cast<std::size_t>(bytes_) - kDataOffset};
  }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Entry& entry(std::uint32_t number) const {
    return reinterpret_cast<Entry*>(base_ + kRingOffset)[number % kRingEntries];
  }
  Completion& completion(std::uint32_t slot) const {
    return reinterpret_cast<Completion*>(base_ + kCompletionsOffset)[slot];
  }
  // Gives all pages back to the system, whoever else still maps them; they read as zeros then.
  void free_pages() const;

 private:
  Memory(UniqueFd fd, std::uint64_t bytes);

  UniqueFd fd_;
  std::uint64_t bytes_;
  std::byte* base_ = nullptr;
};

// Copies what another process may be writing to meanwhile: whatever follows sees the copy alone,
// since no compiler may read the original again in its place.
inline void copy_once(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// A word that another process reads and writes.
inline std::atomic_ref<std::uint32_t> shared(std::uint32_t& word) {
  return std::atomic_ref<std::uint32_t>(word);
}

}  // namespace engram::shm
