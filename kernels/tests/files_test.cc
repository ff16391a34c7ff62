// Opening table files. Whether one can be read directly is the file system's choice: what a
// DataFile says about itself must be consistent either way.
#include "files.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>
#include <vector>

#include "support.h"

namespace engram::test {
namespace {

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(descriptors), end(descriptors)));
}

// The errno with which opening fails; 0 when it does not.
int error_of_opening(const std::string& path) {
  try {
    const DataFile file(path);
  } catch (const std::system_error& error) {
    CHECK(std::string(error.what()).find(path) != std::string::npos);
    return error.code().value();
  }
  return 0;
}

TEST_CASE("a file is described as it is read") {
  Random random(1);
  const TemporaryDirectory directory;
  for (const std::size_t size : {0, 1, 511, 512, 4096, 4097, 100'003}) {
    CAPTURE(size);
    const auto content = random_bytes(random, size);
    const std::string path = directory.write("table.bin", content);
    const DataFile file(path);
    CHECK(file.path() == path);
    CHECK(file.size_bytes() == size);
    CHECK(file.reason() != "");
    CHECK(std::has_single_bit(file.alignment()));
    CHECK(file.alignment() <= kAlignmentMax);
    CHECK((::fcntl(file.fd(), F_GETFL) & O_DIRECT) == (file.direct() ? O_DIRECT : 0));
    CHECK((::fcntl(file.fd(), F_GETFD) & FD_CLOEXEC) != 0);
    if (!file.direct()) CHECK(file.alignment() == 1);
  }
}

TEST_CASE("what is no regular file is refused by name, without waiting on it") {
  const TemporaryDirectory directory;
  const std::string fifo = directory.path("fifo");
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  const std::size_t before = open_descriptors();
  CHECK(error_of_opening(directory.path("missing")) == ENOENT);
  CHECK(error_of_opening(directory.path("")) == EISDIR);
  CHECK(error_of_opening(fifo) == EINVAL);
  CHECK(open_descriptors() == before);
}

TEST_CASE("a moved file keeps its descriptor, and the last owner closes it") {
  const TemporaryDirectory directory;
  const std::string path = directory.write("table.bin", std::vector<std::byte>(5000));
  const std::size_t before = open_descriptors();
  {
    DataFile first(path);
    const int fd = first.fd();
    const DataFile second(std::move(first));
    CHECK(second.fd() == fd);
    CHECK(second.path() == path);
    CHECK(second.size_bytes() == 5000);
    CHECK(open_descriptors() == before + 1);
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("an alignment that fails is raised once, for all threads that read") {
  const TemporaryDirectory directory;
  DataFile file(directory.write("table.bin", std::vector<std::byte>(20'000)));
  const std::uint32_t before = file.alignment();
  const bool can_rise = file.direct();
  std::vector<std::uint32_t> seen(4);
  std::vector<char> raised(4);
  in_parallel(4, [&](unsigned thread) {
    seen[thread] = file.alignment();
    raised[thread] = file.promote_alignment(512);
  });
  for (const std::uint32_t alignment : seen) {
    CHECK((alignment == before || alignment == kFallbackAlignment));
  }
  CHECK(raised == std::vector<char>(4, can_rise));
  CHECK(file.alignment() == (can_rise ? kFallbackAlignment : 1));
  CHECK_FALSE(file.promote_alignment(kFallbackAlignment));
}

TEST_CASE("a device of no file has one hardware queue") {
  CHECK(hardware_queues("/nowhere/at/all") == 1);
  CHECK(hardware_queues("/proc/self/status") == 1);
}

}  // namespace
}  // namespace engram::test
