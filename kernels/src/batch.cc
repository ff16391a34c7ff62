#include "batch.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "row_output.h"

namespace engram {
namespace {

// How many groups ahead of its unpinning an entry is fetched.
constexpr std::size_t kUnpinAhead = 8;

// What one read brings of a row.
enum Part : unsigned {
  kRecord,  // codes, scales and seal
  kCodes,   // codes; the scales are read apart, or taken from memory
  kScales,
};

// A read's tag: its miss, whose low 6 bits are free, and there row and part.
std::uint64_t tag_of(const Miss& miss, unsigned row, unsigned part) {
  static_assert(alignof(Miss) >= 64 && kGroupRows <= 8);
  return reinterpret_cast<std::uint64_t>(&miss) | part << 3 | row;
}
Miss& miss_of(std::uint64_t tag) { return *reinterpret_cast<Miss*>(tag & ~std::uint64_t{63}); }

}  // namespace

std::string failure_text(const RowFailure& failure) {
  return "layer " + std::to_string(failure.layer) + ", row " + std::to_string(failure.row) +
         " could not be read: " + error_text(failure.error);
}

EngineShared::EngineShared(Reader& reader, std::vector<Table> given, std::uint64_t budget_bytes,
                           std::uint64_t cache_bytes)
    : reader(reader),
      tables(std::move(given)),
      budget_bytes(budget_bytes),
      failed_files(reader.files().size()),
      event_fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (event_fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  if (cache_bytes >= RowCache::bytes_min(tables.row_bytes_max())) {
    cache = std::make_unique<RowCache>(cache_bytes, tables.row_bytes_max());
  }
}

EngineShared::~EngineShared() { ::close(event_fd); }

Batch::~Batch() {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const std::size_t ahead = std::min(i + kUnpinAhead, groups_.size() - 1);
    if (groups_[ahead].entry != Miss::kNoEntry) shared_->cache->prefetch(groups_[ahead].entry);
    if (groups_[i].entry != Miss::kNoEntry) shared_->cache->unpin(groups_[i].entry);
  }
  shared_->in_flight_bytes.fetch_sub(reserved_bytes_);
}

// ------------------------------------------------------------------------------------- reading

std::size_t Batch::next(std::span<Read> out, Room& room) {
  std::size_t count = 0;
  while (count < out.size() && at_ < to_read_.size()) {
    Miss& miss = *to_read_[at_];
    if (gave_up_ && !begun_ && !shared_->cache->awaited(miss)) {
      review_ = true;  // without the lock, and all that is left at once
      return count;
    }
    if (!begun_) {
      const std::uint8_t copy = best_copy(miss, room);
      // Not begun before its first read can go: until then a lane that goes first may take it over.
      if (!room.has(table_of(miss).copies[copy].file())) return count;
      if (!begin(miss, copy)) {
        ++at_;
        continue;
      }
      begun_ = true;
    }
    if (!emit(miss, miss.reads, emitted_, out[count], room)) return count;
    ++count;
    if (++emitted_ == count_rows(miss.reads) + count_rows(miss.apart)) {
      emitted_ = 0;
      begun_ = false;
      ++at_;
    }
  }
  return count;
}

const Table& Batch::table_of(const Miss& miss) const {
  return shared_->tables[groups_[miss.group].key.table].table;
}

// The least loaded of those without a failure.
std::uint8_t Batch::best_copy(const Miss& miss, const Room& room) const {
  const TableState& state = shared_->tables[groups_[miss.group].key.table];
  const auto rank = [&](std::uint8_t copy) {
    return std::pair(state.failed[copy].load(std::memory_order_relaxed),
                     room.in_flight(state.table.copies[copy].file()));
  };
  std::uint8_t best = 0;
  for (std::uint8_t copy = 1; copy < state.table.copies.size(); ++copy) {
    if (rank(copy) < rank(best)) best = copy;
  }
  return best;
}

// False when another miss makes its reads.
bool Batch::begin(Miss& miss, std::uint8_t copy) {
  if (!miss.start()) return false;
  set_out(miss, miss.reads, copy);
  return true;
}

// Makes a miss ready for reads of some of its rows from a copy; their number.
unsigned Batch::set_out(Miss& miss, RowMask rows, std::uint8_t copy) const {
  const TableState& state = shared_->tables[groups_[miss.group].key.table];
  miss.copy = copy;
  miss.apart = 0;
  if (!state.table.copies[copy].pages) {
    const std::uint64_t loaded = state.scale_rows_loaded();
    for (unsigned row = 0; row < kGroupRows; ++row) {
      const bool on_disk = groups_[miss.group].key.ids[row] >= loaded;
      miss.apart |= static_cast<RowMask>(on_disk << row);
    }
    miss.apart &= rows;
  }
  const unsigned reads = count_rows(rows) + count_rows(miss.apart);
  miss.reads_left.store(static_cast<std::uint8_t>(reads), std::memory_order_relaxed);
  return reads;
}

// Writes the number-th read of some rows of a miss that is ready for them, if there is room for it.
bool Batch::emit(const Miss& miss, RowMask rows, unsigned number, Read& read, Room& room) {
  const bool paged = table_of(miss).copies[miss.copy].pages.has_value();
  // Codes or records first, then the scales that are read apart.
  const unsigned first = count_rows(rows);
  const bool scales = number >= first;
  RowMask left = scales ? miss.apart : rows;
  for (unsigned skip = scales ? number - first : number; skip > 0; --skip) left &= left - 1;
  const auto row = static_cast<unsigned>(std::countr_zero(left));
  read = read_of(miss, row, scales ? kScales : paged ? kRecord : kCodes);
  if (!room.take(read.file)) return false;
  ++stats_.reads;
  stats_.read_bytes += aligned_span(read.offset, read.length, room.alignment(read.file));
  // What ended() is going to write to: the read leaves memory all the time it needs.
  const std::size_t row_bytes = packed_bytes(table_of(miss).kind);
  prefetch_bytes(miss.data + row * row_bytes, row_bytes);
  if (miss.entry != Miss::kNoEntry) shared_->cache->prefetch(miss.entry);
  return true;
}

Read Batch::read_of(const Miss& miss, unsigned row, unsigned part) const {
  const RowGroup& key = groups_[miss.group].key;
  const Table& table = shared_->tables[key.table].table;
  const TableCopy& copy = table.copies[miss.copy];
  const std::uint64_t tag = tag_of(miss, row, part);
  if (part == kRecord) {
    const RecordFormat format = RecordFormat::of(table.kind);
    return {.offset = copy.pages->offset + format.offset_of(key.ids[row]),
            .file = copy.pages->file,
            .length = static_cast<std::uint16_t>(format.record_bytes),
            .table = key.table,
            .tag = tag};
  }
  const Plane& plane = part == kCodes ? copy.planes.codes : copy.planes.scales;
  return {
      .offset = plane.offset + key.ids[row] * plane.stride,
      .file = plane.file,
      .length = static_cast<std::uint16_t>(part == kCodes ? code_bytes(table.kind) : kScaleBytes),
      .table = key.table,
      .tag = tag};
}

void Batch::ended(const Read& read, std::int32_t error, const std::byte* bytes) {
  Miss& miss = miss_of(read.tag);
  const auto row = static_cast<unsigned>(read.tag & 7);
  if (error == 0) error = keep(miss, row, static_cast<unsigned>(read.tag >> 3 & 7), read, bytes);
  if (error == kErrorChecksum) shared_->checksum_errors.fetch_add(1, std::memory_order_relaxed);
  if (error != 0) {
    TableState& state = shared_->tables[groups_[miss.group].key.table];
    state.failed[miss.copy].store(true, std::memory_order_relaxed);
    if (state.failed.size() > 1) {
      shared_->failed_files[read.file].store(true, std::memory_order_relaxed);
    }
    miss.fail(static_cast<RowMask>(1u << row), error);
  }
  if (miss.reads_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (!read_again(miss)) miss_ended(miss);
}

// Rows of a miss that one copy could not give, from the next; not begun, they can be given up or
// taken over like any. A part of the batch while it is in the queue. Ends itself.
class Batch::Again final : public ReadSource {
 public:
  Again(Batch& batch, Miss& miss, RowMask rows, std::uint8_t copy)
      : batch_(batch), miss_(miss), rows_(rows), copy_(copy) {}

  std::size_t next(std::span<Read> out, Room& room) override {
    if (!begun_) {
      if (!room.has(batch_.table_of(miss_).copies[copy_].file())) return 0;
      begun_ = true;
      if (miss_.start()) reads_ = batch_.set_out(miss_, rows_, copy_);
      parts_.fetch_add(reads_, std::memory_order_relaxed);
    }
    std::size_t count = 0;
    while (count < out.size() && emitted_ < reads_ &&
           batch_.emit(miss_, rows_, emitted_, out[count], room)) {
      ++count;
      ++emitted_;
    }
    return count;
  }
  bool exhausted() const override { return begun_ && emitted_ == reads_; }
  bool wants_out() const override {
    if (begun_ || batch_.wanted_.why_not() == 0) return false;
    return !kept_ || !batch_.shared_->cache->awaited(miss_);
  }
  bool give_up() override {
    kept_ = !batch_.drop(miss_, batch_.wanted_.why_not(), false);
    return kept_;
  }
  void left_queue() override {
    Batch& batch = batch_;
    part_done();
    batch.part_done();
  }
  void ended(const Read& read, std::int32_t error, const std::byte* bytes) override {
    batch_.ended(read, error, bytes);  // after the last of them there may be no batch any more
    part_done();
  }

 private:
  void part_done() {
    if (parts_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  Batch& batch_;
  Miss& miss_;
  const RowMask rows_;
  const std::uint8_t copy_;
  bool begun_ = false;
  bool kept_ = false;  // given up, but for others who wait for it
  unsigned reads_ = 0;
  unsigned emitted_ = 0;
  std::atomic<unsigned> parts_{1};  // reads, and the queue
};

// Whether the rows of a miss that could not be read are on their way from the next copy.
bool Batch::read_again(Miss& miss) {
  const RowMask failed = miss.failed.load(std::memory_order_acquire) & miss.reads;
  const std::size_t copies = table_of(miss).copies.size();
  if (failed == 0 || miss.tries + 1u >= copies) return false;
  std::unique_ptr<Again> again;
  try {
    const auto copy = static_cast<std::uint8_t>((miss.copy + 1u) % copies);
    again = std::make_unique<Again>(*this, miss, failed, copy);
  } catch (const std::bad_alloc&) {
    return false;
  }
  ++miss.tries;
  miss.failed.fetch_and(static_cast<RowMask>(~failed), std::memory_order_relaxed);
  parts_.fetch_add(1, std::memory_order_relaxed);
  miss.state.store(Miss::State::queued, std::memory_order_release);
  try {
    shared_->reader.submit_more(*again, lane_);
    again.release();  // by now it may be gone
    return true;
  } catch (const std::bad_alloc&) {
    const bool taken = !miss.start();
    if (!taken) miss.failed.fetch_or(failed, std::memory_order_relaxed);
    part_done();  // not the last one, unless it was taken
    return taken;
  }
}

// Puts what a read brought where the row belongs. 0, or why it is not the row.
std::int32_t Batch::keep(Miss& miss, unsigned row, unsigned part, const Read& read,
                         const std::byte* bytes) const {
  const RowGroup& key = groups_[miss.group].key;
  const TableState& state = shared_->tables[key.table];
  const std::size_t row_bytes = packed_bytes(state.table.kind);
  std::byte* const to = miss.data + row * row_bytes;
  if (part == kRecord) {
    if (!state.seals[miss.copy].matches(key.ids[row], bytes, row_bytes)) return kErrorChecksum;
    std::memcpy(to, bytes, row_bytes);
    return 0;
  }
  std::byte* const to_scales = to + row_bytes - kScaleBytes;
  std::memcpy(part == kCodes ? to : to_scales, bytes, read.length);
  if (part == kCodes && (miss.apart >> row & 1) == 0) {
    const ScaleMemory* const scales = state.scales.load(std::memory_order_acquire);
    std::memcpy(to_scales, scales->of(key.ids[row]), kScaleBytes);
  }
  return 0;
}

void Batch::miss_ended(Miss& miss) {
  if (miss.entry != Miss::kNoEntry) return tell(shared_->cache->ended(miss));
  miss.next = nullptr;
  tell(&miss);
}

void Batch::tell(Miss* over) {
  while (over != nullptr) {
    Miss* const miss = std::exchange(over, over->next);  // it goes with its batch
    if (Admission* const admission = miss->batch->admission_.get()) {
      const bool well = (miss->failed.load(std::memory_order_acquire) & miss->need) == 0;
      admission->read(count_rows(miss->need), well);
    }
    miss->batch->part_done();
  }
}

bool Batch::wants_out() const { return gave_up_ ? review_ : wanted_.why_not() != 0; }

bool Batch::give_up() {
  gave_up_ = true;
  review_ = false;
  const std::int32_t why = wanted_.why_not();
  // In place: on an io thread, which has nobody to tell that it is out of memory.
  std::size_t kept = 0;
  if (begun_) to_read_[kept++] = to_read_[at_++];  // in the middle of its reads
  for (; at_ < to_read_.size(); ++at_) {
    if (!drop(*to_read_[at_], why, false)) to_read_[kept++] = to_read_[at_];
  }
  to_read_.resize(kept);
  at_ = 0;
  return !to_read_.empty();
}

// False when others wait for it (and `regardless` is not set): then it must be read.
bool Batch::drop(Miss& miss, std::int32_t why, bool regardless) {
  Miss* over = nullptr;
  if (miss.entry != Miss::kNoEntry) {
    if (!shared_->cache->give_up(miss, why, regardless, over)) return false;
  } else if (miss.start()) {
    miss.fail(miss.reads, why);
    over = &miss;
  }
  tell(over);
  return true;
}

// The batch fails as a whole, before any read.
void Batch::fail_all(std::int32_t why) {
  for (Miss& miss : misses_) drop(miss, why, true);  // planning may not have come to to_read_
  to_read_.clear();
  failed_whole_ = why;
}

// Once it is known what has to be read, by whomever.
void Batch::tell_planned() {
  if (!admission_) return;
  std::uint64_t to_read = 0;
  for (const Miss& miss : misses_) to_read += count_rows(miss.need);
  admission_->planned(stats_.rows, to_read, now_ns());
  admitted_reads_ = to_read > 0;
}

void Batch::part_done() {
  if (parts_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish();
}

// On the thread that ended the last part.
void Batch::finish() {
  find_failure();
  shared_->totals_of(lane_).add(stats_);
  if (admitted_reads_) admission_->all_read(now_ns());
  admission_.reset();
  misses_.clear();
  to_read_ = std::vector<Miss*>();
  release_work();
  const std::shared_ptr<Batch> keep = std::move(self_);
  {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    wake_.notify_all();
  }
  if (on_done_) on_done_();
  const std::lock_guard lock(shared_->mutex);
  if (notify_) {
    shared_->completions.push_back(tag_);
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the descriptor is readable already.
    [[maybe_unused]] const ssize_t written = ::write(shared_->event_fd, &one, sizeof one);
  }
  if (--shared_->running == 0) shared_->idle.notify_all();
}

// The first row, in order of submission, that could not be read.
void Batch::find_failure() {
  for (const Miss& miss : misses_) {
    const RowMask failed = miss.failed.load(std::memory_order_acquire) & miss.need;
    if (failed == 0) continue;
    const RowGroup& key = groups_[miss.group].key;
    failure_ = {.layer = shared_->tables[key.table].table.layer,
                .row = key.ids[static_cast<unsigned>(std::countr_zero(failed))],
                .error = miss.error.load(std::memory_order_relaxed)};
    return;
  }
  if (failed_whole_ != 0 && !layers_.empty()) {
    failure_ = {.layer = layers_.front().table->table.layer, .row = -1, .error = failed_whole_};
  }
}

// Gives back what of the budget planning and reading took, and the rows that have slots.
void Batch::release_work() {
  std::uint64_t kept = own_bytes_ + groups_.size() * sizeof(Group);
  for (const LayerRows& rows : layers_) {
    kept += rows.places.size() * sizeof(Place) + rows.ids.size() * sizeof(rows.ids[0]) +
            rows.splits.size() * sizeof(rows.splits[0]);
  }
  kept = std::min(kept, reserved_bytes_);
  shared_->in_flight_bytes.fetch_sub(reserved_bytes_ - kept);
  reserved_bytes_ = kept;
}

bool Batch::wait(std::int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  return wake_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return done(); });
}

void Batch::check() const {
  if (!done()) throw std::logic_error("the batch is still being read");
  if (failure_) throw RowError(*failure_);
}

}  // namespace engram
