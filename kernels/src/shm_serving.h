// What requests are answered from now, and what they were for as long as one of them is under way.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm_request.h"

namespace engram::shm {

// Safe to share between threads.
class Serving {
 public:
  explicit Serving(Served served);

  // A request keeps what it was begun with.
  std::shared_ptr<const Served> now() const;
  // For requests that begin from now on.
  void replace(Served served);
  // Whether no request is under way that began before the last replace().
  bool settled() const;

  // A row was not what the table holds. What was replaced is nobody's concern any more.
  void report_damage(const Served& by, const std::string& sentence);
  // The first such row; empty: none.
  std::string damage() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Served> now_;
  mutable std::vector<std::weak_ptr<const Served>> before_;
  std::string damage_;
};

}  // namespace engram::shm
