// Commits one fault on purpose: that a sanitizer stops it shows that the sanitizer is at work in
// this build.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string_view>
#include <thread>
#include <vector>

namespace {

// Volatile, so that the compiler neither sees the faults coming nor removes them.
volatile std::size_t size = 16;
int shared = 0;

int overflow() {
  const std::vector<int> values(size);
  const volatile int* data = values.data();
  return data[size];
}

int undefined() {
  volatile int largest = std::numeric_limits<int>::max();
  return largest + static_cast<int>(size);
}

int leak() {
  volatile const int* lost = new int[size]();
  const int first = lost[0];
  lost = nullptr;
  return first;
}

int race() {
  std::thread other([] { shared += 1; });
  shared += 1;
  other.join();
  return shared;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view fault = argc == 2 ? argv[1] : "";
  const int result = fault == "overflow"    ? overflow()
                     : fault == "undefined" ? undefined()
                     : fault == "leak"      ? leak()
                     : fault == "race"      ? race()
                                            : -1;
  std::printf("%s went unnoticed: %d\n", argv[argc - 1], result);
  return 0;
}
