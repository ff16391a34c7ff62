// Rows in, rows out: batches of row ids within a budget, read once whoever asks, kept in a cache.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "admission.h"
#include "batch.h"
#include "planner.h"
#include "reader.h"

namespace engram {

// How a batch is asked for.
struct Order {
  std::size_t positions = 0;
  Columns columns{};
  Lane lane = Lane::decode;
  std::optional<double> deadline_s{};  // from now; reads that have not begun by then are given up
  bool notify = false;                 // reports the tag through event_fd()
  std::function<void()> on_done{};     // called when it is done, on any thread; must not throw
  std::shared_ptr<Admission> admission{};  // of the request it is of; null: nobody was asked
};

// How far a load into memory has come.
struct LoadProgress {
  std::uint64_t loaded = 0;
  std::uint64_t rows = 0;
  std::string error;
};

class Engine {
 public:
  // Throws std::invalid_argument when a table does not fit the files it names.
  Engine(std::shared_ptr<Reader> reader, std::vector<Table> tables, std::uint64_t budget_bytes,
         std::uint64_t cache_bytes);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Counts requests in before any work is done for them, whichever way they come.
  Admissions& admissions() const { return *admissions_; }

  // Plans the batch and starts its reads; the ids are not needed afterwards. When the last copy of
  // the pointer goes, reads not started yet are given up, lest a request that nobody waits for
  // keeps others waiting. Throws std::invalid_argument for an unknown layer or an id out of range,
  // Overloaded when the budget is used up.
  std::shared_ptr<Batch> submit(const std::vector<LayerKeys>& keys, const Order& order);

  // What a batch takes of the budget at worst: when none of its groups is in memory, or has a cache
  // slot. Throws std::invalid_argument when that is more than any budget.
  std::uint64_t bytes_of(const std::vector<LayerKeys>& keys, const Order& order) const;
  // Bytes of all rows of an order. Throws std::invalid_argument when layers of different kinds
  // have no row size in common, or the number is too large.
  std::size_t gathered_bytes(const std::vector<LayerKeys>& keys, const Order& order,
                             Format format) const;
  // Copies rows into `out` as gather() of their batch would, if all are in the cache; none: they
  // take a batch, and some of `out` may have been written. Takes none of the budget, since nothing
  // is held when it returns.
  std::optional<BatchStats> copy_hits(const std::vector<LayerKeys>& keys, const Order& order,
                                      Format format, std::byte* out);

  int event_fd() const { return shared_->event_fd; }
  std::vector<std::uint64_t> take_completions();
  std::uint64_t budget_bytes() const { return shared_->budget_bytes; }
  std::uint64_t in_flight_bytes() const { return shared_->in_flight_bytes.load(); }
  // Of all batches and hits of a lane since the start.
  BatchStats totals(Lane lane) const {
    return shared_->totals[static_cast<std::size_t>(lane)].sum();
  }
  const ConvertMetrics& converted() const { return shared_->converted; }
  std::uint64_t checksum_errors() const { return shared_->checksum_errors.load(); }
  // The reader's numbers of files that a read has failed on, of copies that are not their table's
  // only one.
  std::vector<std::uint32_t> failed_files() const;
  RowCache* cache() const { return shared_->cache.get(); }  // null: none
  const Tables& tables() const { return shared_->tables; }

  // Makes the memory of all cache slots ready in the background, as happens anyway once enough of
  // them are used. Until then the first row that comes to a slot waits for the kernel to clear a
  // huge page.
  void populate_cache();

  // Start to load a table's scales, or the whole table, into memory, after those asked for before.
  // Throw std::runtime_error once closed, std::system_error when the loading thread cannot start,
  // std::bad_alloc.
  void load_scales(std::int64_t layer);
  void load_resident(std::int64_t layer);
  LoadProgress scale_progress(std::int64_t layer) const;
  LoadProgress resident_progress(std::int64_t layer) const;

  // Waits for the batches in flight and stops the threads. Any thread may call it, any number of
  // times; each call returns when all is closed.
  void close();

 private:
  void check_fits(const Table& table) const;
  void check_process() const;
  void reserve(Batch& batch, std::uint64_t bytes) const;
  template <typename Memory>
  void load(std::unique_ptr<Memory>& owner, std::atomic<Memory*>& seen,
            const std::function<std::unique_ptr<Memory>()>& make);
  void load_loop();
  void start_loader();

  std::shared_ptr<Reader> reader_;
  std::shared_ptr<EngineShared> shared_;
  std::shared_ptr<Admissions> admissions_ = std::make_shared<Admissions>();
  GroupHash hash_;
  pid_t pid_;
  std::atomic<std::uint64_t> next_tag_{1};
  std::atomic<bool> stop_{false};
  std::atomic<bool> populating_{false};

  std::mutex closing_;  // held by close() throughout
  std::mutex mutex_;    // guards the loads and, until stop_, the threads
  std::condition_variable wake_;
  std::deque<std::function<void()>> to_load_;
  std::thread loader_;
  std::thread populator_;  // not the loader, which may be busy for minutes
};

}  // namespace engram
