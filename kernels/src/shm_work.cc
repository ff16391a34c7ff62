#include "shm_work.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "read.h"

namespace engram::shm {
namespace {

// Of a request in memory: one is gathered while the next is read.
constexpr std::size_t kBlocksAhead = 2;
// Gathered in one step. More than what a gather writes past the CPU's caches: the answer of a
// prefill would only push them out.
constexpr std::size_t kSliceBytes = 4 << 20;
// One client's part of the engine's budget, and of the rows that may be worked on.
constexpr std::uint64_t kClientShare = 8;
// Between two looks whether there is room by now.
constexpr std::chrono::milliseconds kRoomPoll{10};

void add(BatchStats& to, const BatchStats& from) {
  to.distinct += from.distinct;
  to.cached += from.cached;
  to.joined += from.joined;
  to.reads += from.reads;
  to.read_bytes += from.read_bytes;
  to.groups += from.groups;
}

}  // namespace

Work::Work(Scope& scope, const Entry& entry)
    : scope_(scope),
      served_(scope.serving.now()),
      entry_(entry),
      rows_(rows_of(*served_, entry)),
      lane_(lane_of(entry, rows_, scope.limits)) {
  if (rows_ > scope.limits.request_rows) {
    throw Refusal(Status::invalid_argument,
                  "the request asks for " + std::to_string(rows_) + " rows, over the limit of " +
                      std::to_string(scope.limits.request_rows) + ": split it");
  }
  // What is further away than the clock can hold is no deadline.
  constexpr std::uint64_t kYearNs = 365ull * 86'400 * 1'000'000'000;
  if (entry.timeout_ns != 0 && entry.timeout_ns < kYearNs) {
    deadline_ = Clock::now() + std::chrono::nanoseconds(entry.timeout_ns);
  }
}

Work::~Work() { settle(); }

Work::Step Work::step() {
  Step step = Step::over;
  try {
    if (late())
      throw Refusal(Status::deadline_exceeded, "the time allowed for the request ran out");
    step = advance();
  } catch (const Refusal& refusal) {
    end(refusal.status, refusal.what());
  } catch (const std::invalid_argument& error) {
    end(Status::invalid_argument, error.what());
  } catch (const Overloaded& error) {
    served_->engine->admissions().count(error.limit);
    end(Status::resource_exhausted, error.what());
    outcome_.retry_after_ms = static_cast<std::uint32_t>(std::ceil(error.retry_after_s * 1e3));
  } catch (const RowError& error) {
    const std::int32_t why = error.failure.error;
    const bool damaged = why == kErrorTruncated || why == kErrorChecksum;
    if (damaged) scope_.serving.report_damage(*served_, error.what());
    // A device may run out of time as well.
    const bool given_up = why == ETIMEDOUT && late();
    end(given_up ? Status::deadline_exceeded : Status::data_loss, error.what());
  } catch (const std::bad_alloc&) {
    end(Status::resource_exhausted, "the server has no memory for this request now");
  } catch (const std::exception& error) {
    end(Status::internal, std::string("a fault of the server: ") + error.what());
  }
  return step;
}

void Work::end(Status status, const std::string& sentence) {
  settle();
  outcome_ = {.status = status, .sentence = sentence};
}

Work::Step Work::advance() {
  if (!request_) return start();
  if (gathered_ == request_->positions) {
    finish();
    return Step::over;
  }
  if (submitted_ < request_->positions) {
    if (blocks_.empty() && copy_hits()) return Step::did;
    if (blocks_.size() < kBlocksAhead && submit() == Step::did) return Step::did;
  }
  if (!blocks_.empty() && blocks_.front().batch->done()) return gather();
  return Step::waits;
}

Work::Step Work::start() {
  const std::uint64_t share = scope_.limits.admission.rows / kClientShare;
  if (scope_.held_rows != 0 && scope_.held_rows + rows_ > share) return Step::waits;
  if (!admit()) return Step::waits;
  const std::int64_t let_in_ns = now_ns();
  request_ = std::make_shared<const Request>(read_request(*served_, entry_, scope_.data));
  scope_.totals.tap.note(let_in_ns, lane_, entry_, request_);
  const std::uint64_t per_position = std::max<std::uint64_t>(1, block_bytes(1));
  block_positions_ = static_cast<std::size_t>(
      std::max<std::uint64_t>(1, scope_.limits.block_bytes / per_position));
  return Step::did;
}

// False: not yet. A client that has nothing under way is refused at once, and may ask elsewhere;
// one that has waits for its turn, lest it loses a lookup of many requests in the middle of it.
bool Work::admit() {
  std::optional<double> left_s;
  if (deadline_) left_s = std::chrono::duration<double>(*deadline_ - Clock::now()).count();
  try {
    admission_ = served_->engine->admissions().admit(rows_, lane_, scope_.limits.admission, left_s,
                                                     scope_.quota, now_ns());
  } catch (const Overloaded&) {
    if (scope_.held_rows == 0) throw;
    waits_for_admission_ = true;
    return false;
  }
  waits_for_admission_ = false;
  scope_.held_rows += rows_;
  return true;
}

// Packed rows of so many positions.
std::uint64_t Work::block_bytes(std::size_t positions) const {
  const Tables& tables = served_->engine->tables();
  std::uint64_t bytes = 0;
  for (const LayerKeys& keys : request_->keys) {
    bytes += packed_bytes(tables[tables.number_of(keys.layer)].table.kind);
  }
  return positions * request_->columns.count() * bytes;
}

// Of the block that begins at submitted_.
std::vector<LayerKeys> Work::next_keys() const {
  std::vector<LayerKeys> keys = request_->keys;
  for (LayerKeys& layer : keys) {
    layer.ids += static_cast<std::ptrdiff_t>(submitted_) * layer.position_stride;
  }
  return keys;
}

// Rows in place may be any mixture once a file was written to; see Memory.ensure_unwritten.
void Work::ensure_unwritten() const {
  if (served_->sealed) return;
  const std::string change = served_->reader->change();
  if (change.empty()) return;
  throw Refusal(Status::data_loss, change + "; its rows cannot be trusted: open it again");
}

// The next block, when the cache has all of it: no batch, and none of the budget.
bool Work::copy_hits() {
  if (not_all_hits_ == submitted_ + 1) return false;
  const std::size_t count = std::min(block_positions_, request_->positions - submitted_);
  const Order order{
      .positions = count, .columns = request_->columns, .lane = lane_, .admission = admission_};
  std::byte* const out =
      scope_.data.data() + entry_.out_offset + submitted_ * request_->position_bytes();
  const auto stats = served_->engine->copy_hits(next_keys(), order, request_->format, out);
  if (!stats) {
    not_all_hits_ = submitted_ + 1;
    return false;
  }
  ensure_unwritten();
  add(outcome_.stats, *stats);
  submitted_ += count;
  gathered_ += count;
  return true;
}

Work::Step Work::submit() {
  const std::size_t count = std::min(block_positions_, request_->positions - submitted_);
  const std::vector<LayerKeys> keys = next_keys();
  Order order{
      .positions = count, .columns = request_->columns, .lane = lane_, .admission = admission_};
  if (deadline_) {
    order.deadline_s = std::chrono::duration<double>(*deadline_ - Clock::now()).count();
  }
  const std::uint64_t bytes = served_->engine->bytes_of(keys, order);
  const std::uint64_t held = scope_.submitted_bytes->load();
  if (held != 0 && held + bytes > served_->engine->budget_bytes() / kClientShare) {
    return Step::waits;
  }
  order.on_done = on_done(bytes);
  try {
    blocks_.push_back({.batch = served_->engine->submit(keys, order), .count = count});
  } catch (const Overloaded&) {
    // A full engine refuses a new request, unless it is this client's own that fill it; one that
    // has begun is worth finishing.
    const Clock::time_point now = Clock::now();
    if (!waits_for_budget_until_) waits_for_budget_until_ = now + scope_.limits.budget_wait;
    const bool begun = submitted_ > 0 || held > 0;
    if (!begun || now >= *waits_for_budget_until_) throw;
    return Step::waits;
  }
  waits_for_budget_until_.reset();
  submitted_ += count;
  return Step::did;
}

// What a batch is to call. It counts the batch's bytes for as long as there is the batch, which
// outlives a request that was given up: else a client that gives up fast would have more than its
// share.
std::function<void()> Work::on_done(std::uint64_t bytes) const {
  scope_.submitted_bytes->fetch_add(bytes);
  const std::shared_ptr<const void> counted(
      nullptr, [count = scope_.submitted_bytes, ring = scope_.ring, bytes](const void*) {
        count->fetch_sub(bytes);
        ring();
      });
  return [ring = scope_.ring, counted] { ring(); };
}

Work::Step Work::gather() {
  Block& block = blocks_.front();
  if (!block.checked) {
    ensure_unwritten();
    block.batch->check();
    add(outcome_.stats, block.batch->stats());
    block.checked = true;
  }
  const std::size_t bytes = request_->position_bytes();
  // Equal slices, lest the last is one that a gather would push into the caches.
  const std::size_t slices = std::max<std::size_t>(1, block.count * bytes / kSliceBytes);
  const std::size_t slice = (block.count + slices - 1) / slices;
  const std::size_t count = std::min(slice, block.count - block.done);
  block.batch->gather(block.done, count, request_->format,
                      scope_.data.data() + entry_.out_offset + gathered_ * bytes);
  block.done += count;
  gathered_ += count;
  if (block.done == block.count) blocks_.pop_front();
  return Step::did;
}

// Before the client hears of its end, so that there is room for what it asks for next.
void Work::settle() {
  blocks_.clear();
  if (!admission_) return;
  scope_.held_rows -= rows_;
  admission_->release();
  admission_.reset();
}

void Work::finish() {
  const std::size_t payload = request_->payload_bytes();
  if (request_->mask) {
    std::memcpy(scope_.data.data() + entry_.out_offset + payload, request_->mask.get(),
                request_->positions);
  }
  outcome_.payload_bytes = payload;
  outcome_.row_bytes = static_cast<std::uint32_t>(request_->row_bytes);
  outcome_.stats.rows = request_->positions * request_->keys.size() * request_->columns.count();
  settle();
}

Clock::time_point Work::look_again() const {
  Clock::time_point at = deadline_.value_or(Clock::time_point::max());
  if (waits_for_admission_ || waits_for_budget_until_) at = std::min(at, Clock::now() + kRoomPoll);
  return at;
}

}  // namespace engram::shm
