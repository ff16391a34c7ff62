#include "shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace engram::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

Memory Memory::create(std::uint64_t data_bytes) {
  const std::uint64_t rounded = (data_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::uint64_t bytes = kDataOffset + rounded;
  UniqueFd fd(::memfd_create("engram-client", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail(errno, "a memory file could not be made");
  // Allocated now, memory that there is not is an error here and not a signal later.
  if (const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes))) {
    fail(error, "no memory for a file of " + std::to_string(bytes) + " bytes");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail(errno, "a memory file could not be sealed");
  Memory memory(std::move(fd), bytes);
  new (&memory.header()) Header{.data_offset = kDataOffset, .data_bytes = rounded};
  return memory;
}

Memory Memory::map(UniqueFd fd, std::uint64_t file_bytes) {
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) fail(errno, "the memory file could not be examined");
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw std::runtime_error("the memory file is not sealed against shrinking");
  }
  if (static_cast<std::uint64_t>(info.st_size) != file_bytes ||
      file_bytes < kDataOffset + kDataBytesMin) {
    throw std::runtime_error("the memory file has " + std::to_string(info.st_size) +
                             " bytes, but the server speaks of " + std::to_string(file_bytes));
  }
  Memory memory(std::move(fd), file_bytes);
  const Header& header = memory.header();
  if (header.magic != kMagic || header.version != kVersion || header.slots != kSlots ||
      header.ring_entries != kRingEntries || header.data_offset != kDataOffset ||
      header.data_bytes != file_bytes - kDataOffset) {
    throw std::runtime_error("the memory file has another layout than version " +
                             std::to_string(kVersion));
  }
  return memory;
}

Memory::Memory(UniqueFd fd, std::uint64_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  void* const at =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), 0);
  if (at == MAP_FAILED) fail(errno, "a memory file could not be mapped");
  base_ = static_cast<std::byte*>(at);
}

Memory::Memory(Memory&& other) noexcept
    : fd_(std::move(other.fd_)), bytes_(other.bytes_), base_(std::exchange(other.base_, nullptr)) {}

Memory::~Memory() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

void Memory::free_pages() const { ::madvise(base_, bytes_, MADV_REMOVE); }

}  // namespace engram::shm
