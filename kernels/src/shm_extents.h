// Which parts of a data area are free: first fit, neighbours joined again.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

namespace engram::shm {

class Extents {
 public:
  // Sizes are rounded up to this, and so are offsets.
  static constexpr std::uint64_t kUnit = 4096;

  explicit Extents(std::uint64_t bytes) { free_.emplace(0, bytes / kUnit * kUnit); }

  static std::uint64_t rounded(std::uint64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

  std::optional<std::uint64_t> take(std::uint64_t bytes) {
    const std::uint64_t wanted = rounded(bytes);
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      const auto [offset, size] = *at;
      if (size < wanted) continue;
      free_.erase(at);
      if (size > wanted) free_.emplace(offset + wanted, size - wanted);
      return offset;
    }
    return std::nullopt;
  }

  // What take() gave for as many bytes.
  void give(std::uint64_t offset, std::uint64_t bytes) {
    auto at = free_.emplace(offset, rounded(bytes)).first;
    if (const auto next = std::next(at);
        next != free_.end() && at->first + at->second == next->first) {
      at->second += next->second;
      free_.erase(next);
    }
    if (at == free_.begin()) return;
    if (const auto before = std::prev(at); before->first + before->second == at->first) {
      before->second += at->second;
      free_.erase(at);
    }
  }

 private:
  std::map<std::uint64_t, std::uint64_t> free_;  // offset, bytes
};

}  // namespace engram::shm
