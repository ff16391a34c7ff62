// Who is let in: what all requests being worked on may ask for together, how long a new one would
// wait, and what one client may have of both.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "read.h"

namespace engram {

// Of rows and budget, one part in so many is for decode alone: bulk lanes must not shut it out.
inline constexpr std::uint64_t kDecodeShare = 8;
inline std::uint64_t limit_of(Lane lane, std::uint64_t all) {
  return is_bulk(lane) ? all - all / kDecodeShare : all;
}

// What a refused request ran into.
enum class OverloadLimit : std::uint8_t { rows, queue, deadline, client_rows, client_rate, budget };
inline constexpr std::array kOverloadNames{"rows",        "queue",       "deadline",
                                           "client_rows", "client_rate", "budget"};

// There is no room now. The same request may be let in `retry_after_s` from now.
class Overloaded : public std::runtime_error {
 public:
  Overloaded(OverloadLimit limit, double retry_after_s, const std::string& sentence);
  OverloadLimit limit;
  double retry_after_s;
};

struct AdmissionLimits {
  std::uint64_t rows = 16 * 65'536 * 48;  // of all requests being worked on
  double queue_s = 1.0;                   // that a new request may have to wait for others
  // Of one client; 0: no limit.
  std::uint64_t client_rows = 0;
  double client_rows_per_s = 0.0;
};

class Admission;
class Admissions;

// What one client has been let in with.
class Quota {
  friend class Admission;
  friend class Admissions;
  std::uint64_t rows_ = 0;     // being worked on
  double balance_rows_ = 0.0;  // what its rate allows it still; below 0 it has to wait
  std::int64_t balanced_ns_ = 0;
  bool known_ = false;
};

// A request that was let in, until it is released or dropped.
class Admission {
 public:
  ~Admission() { release(); }
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

  // It is over; any number of times.
  void release();

  // From its batches. One of so many rows was planned, of which `to_read` are not in memory;
  void planned(std::uint64_t rows, std::uint64_t to_read, std::int64_t now_ns);
  // some of these were read, or (not `well`) given up;
  void read(std::uint64_t rows, bool well);
  // and all of them: once for a batch that had any.
  void all_read(std::int64_t now_ns);

 private:
  friend class Admissions;
  Admission(std::shared_ptr<Admissions> all, std::uint64_t rows, Lane lane,
            std::shared_ptr<Quota> client)
      : all_(std::move(all)), rows_(rows), lane_(lane), client_(std::move(client)) {}

  std::shared_ptr<Admissions> all_;
  const std::uint64_t rows_;
  const Lane lane_;
  std::shared_ptr<Quota> client_;
  std::list<Admission*>::iterator place_{};
  bool held_ = false;                     // guarded by all_, as is planned_
  std::uint64_t planned_ = 0;             // rows
  std::atomic<std::int64_t> to_read_{0};  // rows; a moment below 0 when they are read fast
};

// All of them, whichever way they came. Decode is judged apart from the bulk lanes, which read only
// what it leaves them.
//
// The wait of a new request of R rows is estimated as what the others still have to read, R of each
// at most (requests of a lane are read by turns, so a huge one does not hold up a small one), over
// the rows read per second of late. Both count what has to be read, not what the cache has, so that
// hits make neither a queue nor a rate; what is not planned yet counts by the share of rows that
// had to be read of late. A request whose planned rows are all read waits for its client, and holds
// nobody up.
class Admissions : public std::enable_shared_from_this<Admissions> {
 public:
  // Throws Overloaded, without having counted anything. With nothing to wait for, a request is
  // refused by no estimate; and a client's only request by none of the client's limits.
  std::shared_ptr<Admission> admit(std::uint64_t rows, Lane lane, const AdmissionLimits& limits,
                                   std::optional<double> left_s, std::shared_ptr<Quota> client,
                                   std::int64_t now_ns);

  // By who answers a request with an Overloaded, whoever threw it.
  void count(OverloadLimit limit) {
    refused_[static_cast<std::size_t>(limit)].fetch_add(1, std::memory_order_relaxed);
  }
  std::uint64_t refused(OverloadLimit limit) const {
    return refused_[static_cast<std::size_t>(limit)].load();
  }
  std::uint64_t rows() const;  // of all requests being worked on
  // What the largest request of a lane would wait for, by the estimate.
  double wait_s(Lane lane, std::int64_t now_ns);

 private:
  friend class Admission;
  // Before anything was read: what a good drive does. A worse one is found out in a second or two,
  // and until then more is let in than it can do.
  static constexpr double kFirstRowsPerS = 1e6;
  struct Queue {
    std::list<Admission*> admissions;
    double rows_per_s = kFirstRowsPerS;       // read, while anything is being read
    double share = 1.0;                       // of rows planned, those that have to be read
    unsigned reading = 0;                     // batches
    std::int64_t busy_ns = 0;                 // not yet in rows_per_s
    std::int64_t since_ns = 0;                // the rest of it, while something is being read
    std::atomic<std::uint64_t> read_rows{0};  // not yet in rows_per_s
  };

  Queue& queue_of(Lane lane) { return queues_[is_bulk(lane) ? 1 : 0]; }
  static void measure(Queue& queue, std::int64_t now_ns);
  static double rows_ahead(const Queue& queue, std::uint64_t rows);
  static void check_client(std::uint64_t rows, const AdmissionLimits& limits, Quota& client,
                           std::int64_t now_ns);
  void check_rows(std::uint64_t rows, Lane lane, std::uint64_t limit);
  static void check_wait(std::uint64_t rows, const AdmissionLimits& limits,
                         std::optional<double> left_s, const Queue& queue);

  mutable std::mutex mutex_;
  std::uint64_t rows_ = 0;
  std::array<Queue, 2> queues_;
  std::array<std::atomic<std::uint64_t>, kOverloadNames.size()> refused_{};
};

}  // namespace engram
