#include "shm_serving.h"

#include <utility>

namespace engram::shm {

Serving::Serving(Served served) : now_(std::make_shared<const Served>(std::move(served))) {}

std::shared_ptr<const Served> Serving::now() const {
  const std::lock_guard lock(mutex_);
  return now_;
}

void Serving::replace(Served served) {
  auto next = std::make_shared<const Served>(std::move(served));
  // What is replaced may be the last to hold an engine: it ends after the lock is gone.
  const std::lock_guard lock(mutex_);
  before_.push_back(now_);
  now_.swap(next);
  damage_.clear();
}

bool Serving::settled() const {
  const std::lock_guard lock(mutex_);
  std::erase_if(before_,
                [](const std::weak_ptr<const Served>& served) { return served.expired(); });
  return before_.empty();
}

void Serving::report_damage(const Served& by, const std::string& sentence) {
  const std::lock_guard lock(mutex_);
  if (&by == now_.get() && damage_.empty()) damage_ = sentence;
}

std::string Serving::damage() const {
  const std::lock_guard lock(mutex_);
  return damage_;
}

}  // namespace engram::shm
