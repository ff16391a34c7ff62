#include "admission.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "metrics.h"

namespace engram {
namespace {

// The rate is that of the last half second of reading: longer than reads come in bursts, short
// enough to notice a stall before a queue is full.
constexpr double kRateS = 0.5;
// The share is that of the last rows planned: about one chunk of a prefill.
constexpr double kShareRows = 65'536;
// A client may have been silent for so long, and then use its rate at once.
constexpr double kBurstS = 1.0;
// Below it nobody comes back sooner anyway; above it an estimate is a guess.
constexpr double kRetryMinS = 0.01;
constexpr double kRetryMaxS = 5.0;

std::string seconds(double value) {
  const auto hundredths = static_cast<std::uint64_t>(std::min(value, 1e9) * 100);
  const std::string fraction = std::to_string(hundredths % 100);
  return std::to_string(hundredths / 100) + (fraction.size() == 1 ? ".0" : ".") + fraction + " s";
}

}  // namespace

Overloaded::Overloaded(OverloadLimit limit, double retry_after_s, const std::string& sentence)
    : std::runtime_error(sentence),
      limit(limit),
      retry_after_s(std::clamp(retry_after_s, kRetryMinS, kRetryMaxS)) {}

// --------------------------------------------------------------------------------- one request

void Admission::release() {
  const std::lock_guard lock(all_->mutex_);
  if (!std::exchange(held_, false)) return;
  all_->queue_of(lane_).admissions.erase(place_);
  all_->rows_ -= rows_;
  if (client_) client_->rows_ -= rows_;
}

void Admission::planned(std::uint64_t rows, std::uint64_t to_read, std::int64_t now_ns) {
  if (rows == 0) return;
  const std::lock_guard lock(all_->mutex_);
  Admissions::Queue& queue = all_->queue_of(lane_);
  planned_ += rows;
  const auto count = static_cast<double>(rows);
  const double share = static_cast<double>(to_read) / count;
  queue.share += (share - queue.share) * count / (count + kShareRows);
  if (to_read == 0) return;
  to_read_.fetch_add(static_cast<std::int64_t>(to_read));
  if (queue.reading++ == 0) queue.since_ns = now_ns;
}

void Admission::read(std::uint64_t rows, bool well) {
  to_read_.fetch_sub(static_cast<std::int64_t>(rows), std::memory_order_relaxed);
  if (well) all_->queue_of(lane_).read_rows.fetch_add(rows, std::memory_order_relaxed);
}

void Admission::all_read(std::int64_t now_ns) {
  const std::lock_guard lock(all_->mutex_);
  Admissions::Queue& queue = all_->queue_of(lane_);
  if (--queue.reading == 0) queue.busy_ns += now_ns - queue.since_ns;
}

// -------------------------------------------------------------------------------- all of them

std::shared_ptr<Admission> Admissions::admit(std::uint64_t rows, Lane lane,
                                             const AdmissionLimits& limits,
                                             std::optional<double> left_s,
                                             std::shared_ptr<Quota> client, std::int64_t now_ns) {
  std::shared_ptr<Admission> admission(
      new Admission(shared_from_this(), rows, lane, std::move(client)));
  const std::lock_guard lock(mutex_);
  Quota* const quota = admission->client_.get();
  if (quota != nullptr) check_client(rows, limits, *quota, now_ns);
  check_rows(rows, lane, limits.rows);
  Queue& queue = queue_of(lane);
  measure(queue, now_ns);
  check_wait(rows, limits, left_s, queue);
  admission->place_ = queue.admissions.insert(queue.admissions.end(), admission.get());
  admission->held_ = true;
  rows_ += rows;
  if (quota != nullptr) {
    quota->rows_ += rows;
    quota->balance_rows_ -= static_cast<double>(rows);
  }
  return admission;
}

std::uint64_t Admissions::rows() const {
  const std::lock_guard lock(mutex_);
  return rows_;
}

double Admissions::wait_s(Lane lane, std::int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  Queue& queue = queue_of(lane);
  measure(queue, now_ns);
  return rows_ahead(queue, UINT64_MAX) / queue.rows_per_s;
}

// Takes what was read since the last call into the rate.
void Admissions::measure(Queue& queue, std::int64_t now_ns) {
  if (queue.reading > 0) {
    queue.busy_ns += now_ns - queue.since_ns;
    queue.since_ns = now_ns;
  }
  if (queue.busy_ns <= 0) return;
  const double busy_s = static_cast<double>(std::exchange(queue.busy_ns, 0)) / 1e9;
  const auto rows = static_cast<double>(queue.read_rows.exchange(0, std::memory_order_relaxed));
  const double weight = -std::expm1(-busy_s / kRateS);
  queue.rows_per_s += (rows / busy_s - queue.rows_per_s) * weight;
  queue.rows_per_s = std::max(1.0, queue.rows_per_s);
}

// What a request of so many rows would see read of others before its own.
double Admissions::rows_ahead(const Queue& queue, std::uint64_t rows) {
  double ahead = 0;
  for (const Admission* const other : queue.admissions) {
    const auto to_read = static_cast<double>(std::max<std::int64_t>(0, other->to_read_.load()));
    if (to_read == 0 && other->planned_ > 0) continue;  // it waits for its client
    const std::uint64_t unplanned = other->rows_ - std::min(other->planned_, other->rows_);
    const double left = to_read + queue.share * static_cast<double>(unplanned);
    ahead += std::min(left, static_cast<double>(rows));
  }
  return ahead;
}

void Admissions::check_client(std::uint64_t rows, const AdmissionLimits& limits, Quota& client,
                              std::int64_t now_ns) {
  if (limits.client_rows != 0 && client.rows_ != 0 && client.rows_ + rows > limits.client_rows) {
    throw Overloaded(OverloadLimit::client_rows, 0.0,
                     "the client has " + std::to_string(client.rows_) + " rows being worked on; " +
                         std::to_string(rows) + " more would pass the " +
                         std::to_string(limits.client_rows) + " that one client may have");
  }
  if (limits.client_rows_per_s <= 0) return;
  const double most = limits.client_rows_per_s * kBurstS;
  const double since_s = static_cast<double>(now_ns - client.balanced_ns_) / 1e9;
  client.balance_rows_ =
      !client.known_ ? most
                     : std::min(most, client.balance_rows_ + limits.client_rows_per_s * since_s);
  client.balanced_ns_ = now_ns;
  client.known_ = true;
  if (client.balance_rows_ > 0) return;
  const double wait_s = -client.balance_rows_ / limits.client_rows_per_s;
  throw Overloaded(OverloadLimit::client_rate, wait_s,
                   "the client has used up the " +
                       std::to_string(static_cast<std::uint64_t>(limits.client_rows_per_s)) +
                       " rows a second that one client may ask for; it may go on in " +
                       seconds(wait_s));
}

void Admissions::check_rows(std::uint64_t rows, Lane lane, std::uint64_t limit) {
  limit = limit_of(lane, limit);
  if (rows_ <= limit && rows <= limit - rows_) return;
  throw Overloaded(OverloadLimit::rows, 0.0,
                   std::to_string(rows_) + " rows are being worked on; " + std::to_string(rows) +
                       " more would pass the limit of " + std::to_string(limit) +
                       (is_bulk(lane) ? " for lanes other than decode" : ""));
}

void Admissions::check_wait(std::uint64_t rows, const AdmissionLimits& limits,
                            std::optional<double> left_s, const Queue& queue) {
  const double ahead = rows_ahead(queue, rows);
  if (ahead == 0) return;
  const double wait_s = ahead / queue.rows_per_s;
  if (wait_s > limits.queue_s) {
    throw Overloaded(OverloadLimit::queue, wait_s - limits.queue_s,
                     "the request would wait about " + seconds(wait_s) + " for others, over the " +
                         seconds(limits.queue_s) + " of --queue-seconds");
  }
  const double own_s = queue.share * static_cast<double>(rows) / queue.rows_per_s;
  if (left_s && wait_s + own_s > *left_s) {
    throw Overloaded(OverloadLimit::deadline, wait_s + own_s - *left_s,
                     "the request would take about " + seconds(wait_s + own_s) + ", of which " +
                         seconds(wait_s) + " to wait for others, and has " + seconds(*left_s));
  }
}

}  // namespace engram
