// One submitted set of rows: its groups, the reads of those that are not in memory, and the
// gathering of its rows in any format.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "admission.h"
#include "format.h"
#include "layer_keys.h"
#include "metrics.h"
#include "read_queue.h"
#include "reader.h"
#include "row_cache.h"
#include "tables.h"

namespace engram {

class RowOutput;

struct RowFailure {
  std::int64_t layer = 0;
  std::int64_t row = 0;
  std::int32_t error = 0;
};
std::string failure_text(const RowFailure& failure);

class RowError : public std::runtime_error {
 public:
  explicit RowError(const RowFailure& failure)
      : std::runtime_error(failure_text(failure)), failure(failure) {}
  RowFailure failure;
};

inline constexpr const char* kNoCommonForm =
    "layers of different row kinds have no packed form in common; ask for them one by one";

struct BatchStats {
  std::uint64_t rows = 0;      // asked for, zero rows included
  std::uint64_t distinct = 0;  // rows of distinct groups
  std::uint64_t cached = 0;    // of these: from memory
  std::uint64_t joined = 0;    // of these: read by another batch
  std::uint64_t reads = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t groups = 0;  // distinct ones
};

// The same of all batches of a lane since the start, failed ones too.
struct LaneTotals {
  std::array<std::atomic<std::uint64_t>, 7> fields{};  // as in BatchStats

  void add(const BatchStats& stats) {
    const std::array<std::uint64_t, 7> values{stats.rows,   stats.distinct, stats.cached,
                                              stats.joined, stats.reads,    stats.read_bytes,
                                              stats.groups};
    for (std::size_t i = 0; i < values.size(); ++i) {
      fields[i].fetch_add(values[i], std::memory_order_relaxed);
    }
  }
  BatchStats sum() const {
    return {fields[0].load(), fields[1].load(), fields[2].load(), fields[3].load(),
            fields[4].load(), fields[5].load(), fields[6].load()};
  }
};

// What batches and their engine share; outlives both.
struct EngineShared {
  EngineShared(Reader& reader, std::vector<Table> tables, std::uint64_t budget_bytes,
               std::uint64_t cache_bytes);
  ~EngineShared();

  Reader& reader;  // there while a batch is being read
  Tables tables;
  const std::uint64_t budget_bytes;
  std::unique_ptr<RowCache> cache;  // null: none
  std::atomic<std::uint64_t> in_flight_bytes{0};
  std::array<LaneTotals, kLanes> totals;
  std::atomic<std::uint64_t> checksum_errors{0};  // of rows read
  // By number: whether a read has failed on it that another copy could be asked for.
  std::vector<std::atomic<bool>> failed_files;
  ConvertMetrics converted;

  LaneTotals& totals_of(Lane lane) { return totals[static_cast<std::size_t>(lane)]; }

  std::mutex mutex;
  std::condition_variable idle;
  std::uint64_t running = 0;               // batches whose reads have not all ended
  std::vector<std::uint64_t> completions;  // tags, for event_fd
  int event_fd = -1;
};

// Immutable once done; its rows live as long as it does.
class Batch final : public ReadSource {
 public:
  ~Batch() override;
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  std::uint64_t tag() const { return tag_; }
  std::size_t positions() const { return positions_; }
  std::size_t width() const { return columns_.count(); }
  std::size_t layers() const { return layers_.size(); }
  bool done() const { return done_.load(std::memory_order_acquire); }
  // False when `timeout_ms` passed first.
  bool wait(std::int64_t timeout_ms);

  // The rest needs done().
  const std::optional<RowFailure>& failure() const { return failure_; }
  const BatchStats& stats() const { return stats_; }
  // Throws RowError when a row failed.
  void check() const;
  // Bytes of a gather; throws what it would throw: as check(), and std::invalid_argument for
  // positions that the batch has not.
  std::size_t gathered_bytes(std::size_t first, std::size_t count, Format format) const;
  // Rows of positions first .. first + count - 1 as [count, layers, width, row].
  void gather(std::size_t first, std::size_t count, Format format, std::byte* out) const;
  // Bytes of one layer's row; throws std::invalid_argument for a layer the batch has not.
  std::size_t row_bytes(std::size_t layer, Format format) const;
  // Rows picks[i] of one layer's [positions, width], flattened, as [picks, row]. Throws
  // std::invalid_argument for one that is not there.
  void pick(std::size_t layer, std::span<const std::int64_t> picks, Format format,
            std::byte* out) const;

 private:
  friend class Engine;
  friend class Planner;
  class Again;

  // A distinct group and its rows.
  struct Group {
    RowGroup key;
    RowMask need = 0;
    std::uint32_t entry = Miss::kNoEntry;  // pinned
    std::byte* data = nullptr;
  };
  // Where the rows of a group at a position are: in memory, nowhere (zero rows), or apart (a
  // split).
  class Place {
   public:
    Place() = default;
    static Place of(const std::byte* data) { return Place(reinterpret_cast<std::uintptr_t>(data)); }
    static Place split(std::size_t number) { return Place(number << 1 | 1); }

    bool zero() const { return value_ == 0; }
    bool is_split() const { return (value_ & 1) != 0; }
    bool together() const { return !zero() && !is_split(); }
    const std::byte* data() const { return reinterpret_cast<const std::byte*>(value_); }
    std::size_t number() const { return value_ >> 1; }

   private:
    explicit Place(std::uintptr_t value) : value_(value) {}
    std::uintptr_t value_ = 0;  // an address, even as memory for rows is, or a number and a bit
  };
  // What a position has instead of a group's number, while it is planned.
  static constexpr std::int32_t kZeroRows = -1;
  static constexpr std::int32_t kSplit = -2;  // and below: number -2 - n of `splits`
  struct LayerRows {
    const TableState* table = nullptr;
    std::uint16_t number = 0;             // of the table
    const std::byte* resident = nullptr;  // the whole table; then only `ids` is used
    std::vector<std::int32_t> index{};    // [positions, groups]: group, kZeroRows or a split; then
    std::vector<Place> places{};          // the same, once the groups have their memory
    std::deque<std::array<std::int32_t, kGroupRows>> splits{};  // rows that form no group, singly
    std::vector<std::uint32_t> ids{};  // [positions, width] of a resident table
  };

  Batch(std::shared_ptr<EngineShared> shared, std::uint64_t tag)
      : shared_(std::move(shared)), tag_(tag) {}

  // As a source of reads.
  std::size_t next(std::span<Read> out, Room& room) override;
  bool exhausted() const override { return at_ == to_read_.size(); }
  bool wants_out() const override;
  bool give_up() override;
  void left_queue() override { part_done(); }
  void ended(const Read& read, std::int32_t error, const std::byte* bytes) override;

  const Table& table_of(const Miss& miss) const;
  std::uint8_t best_copy(const Miss& miss, const Room& room) const;
  bool begin(Miss& miss, std::uint8_t copy);
  unsigned set_out(Miss& miss, RowMask rows, std::uint8_t copy) const;
  bool emit(const Miss& miss, RowMask rows, unsigned number, Read& read, Room& room);
  Read read_of(const Miss& miss, unsigned row, unsigned part) const;
  std::int32_t keep(Miss& miss, unsigned row, unsigned part, const Read& read,
                    const std::byte* bytes) const;
  bool read_again(Miss& miss);
  void miss_ended(Miss& miss);
  static void tell(Miss* over);
  bool drop(Miss& miss, std::int32_t why, bool regardless);

  const std::byte* row(const LayerRows& rows, std::size_t position, std::size_t column) const;
  const std::byte* row(const LayerRows& rows, Place place, std::size_t r) const;
  std::byte* gather_groups(const LayerRows& rows, std::size_t position, const RowOutput& output,
                           std::byte* out) const;
  std::byte* gather_resident(const LayerRows& rows, std::size_t position, const RowOutput& output,
                             std::byte* out) const;

  void cancel() { wanted_.drop(); }
  void tell_planned();
  void fail_all(std::int32_t why);
  void find_failure();
  void release_work();
  void part_done();
  void finish();

  std::shared_ptr<EngineShared> shared_;
  std::uint64_t tag_ = 0;
  bool notify_ = false;
  std::function<void()> on_done_;
  Lane lane_ = Lane::decode;
  std::shared_ptr<Admission> admission_;  // until it is done
  bool admitted_reads_ = false;           // the admission waits for them to end
  Wanted wanted_;
  std::size_t positions_ = 0;
  Columns columns_;
  std::uint64_t reserved_bytes_ = 0;
  std::vector<LayerRows> layers_;
  std::vector<Group> groups_;
  std::vector<std::unique_ptr<std::byte[]>> own_memory_;  // of groups without a cache slot
  std::uint64_t own_bytes_ = 0;

  // While it is read.
  std::deque<Miss> misses_;
  std::vector<Miss*> to_read_;
  std::size_t at_ = 0;        // in to_read_
  bool begun_ = false;        // that miss has its copy and its count of reads
  std::uint8_t emitted_ = 0;  // of these, handed out
  bool gave_up_ = false;      // what is left is read for others
  bool review_ = false;       // and some of them have given up, too
  std::int32_t failed_whole_ = 0;
  std::atomic<std::size_t> parts_{1};  // misses that are not over, and planning or the queue

  BatchStats stats_;
  std::optional<RowFailure> failure_;
  std::shared_ptr<Batch> self_;  // while the engine works on it, whatever the caller does
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace engram
