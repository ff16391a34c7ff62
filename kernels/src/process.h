// Objects whose threads belong to the process that made them.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

namespace engram {

// Makes a T that only this process destroys. A forked child has a copy without the threads: waiting
// for them, or destroying what they wait on, would block it for ever, so it leaves the copy be.
template <typename T, typename... Args>
std::shared_ptr<T> make_for_this_process(Args&&... args) {
  const auto destroy = [owner = ::getpid()](T* object) {
    if (::getpid() == owner) delete object;
  };
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), destroy);
}

}  // namespace engram
