// Rows in, rows out: dedupes batches of row ids within a budget, and has what is needed read.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "batch.h"
#include "reader.h"
#include "scales.h"

namespace engram {

// Ids [positions, width] of one layer, as the caller holds them; strides in elements.
struct LayerKeys {
  std::int64_t layer = 0;
  const std::int64_t* ids = nullptr;
  std::int64_t position_stride = 0;
  std::int64_t column_stride = 0;
};

class Overloaded : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Engine {
 public:
  // Throws std::invalid_argument when a table does not fit the files it names.
  Engine(std::shared_ptr<Reader> reader, std::vector<Table> tables, std::uint64_t budget_bytes);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Copies the ids and starts the reads. When the last copy of the pointer goes, reads not started
  // yet are given up, lest a request that nobody waits for keeps others waiting. Throws
  // std::invalid_argument for an unknown layer or an id out of range, Overloaded when the budget is
  // used up.
  std::shared_ptr<Batch> submit(const std::vector<LayerKeys>& keys, std::size_t positions,
                                std::size_t width, bool notify);

  int event_fd() const { return shared_->event_fd; }
  std::vector<std::uint64_t> take_completions();
  std::uint64_t in_flight_bytes() const { return shared_->in_flight_bytes.load(); }

  // Starts to load a table's scales into memory, after those asked for before. Throws
  // std::runtime_error once closed, std::system_error when the loading thread cannot start.
  void load_scales(std::int64_t layer);
  struct ScaleProgress {
    std::uint64_t loaded = 0;
    std::uint64_t rows = 0;
    std::string error;
  };
  ScaleProgress scale_progress(std::int64_t layer) const;

  // Waits for the batches in flight and stops the threads. Any thread may call it, any number of
  // times; each call returns when all is closed.
  void close();

 private:
  struct TableState {
    Table table;
    // Set once by load_scales, read by every plan.
    std::atomic<ScaleMemory*> scales{nullptr};
    std::unique_ptr<ScaleMemory> scales_owner;
  };

  const TableState& state_of(std::int64_t layer) const;
  void check_fits(const Table& table) const;
  void copy_ids(Batch& batch, const std::vector<LayerKeys>& keys) const;
  void reserve(Batch& batch, std::uint64_t bytes) const;
  void plan(Batch& batch);
  void plan_layer(Batch& batch, Batch::LayerRows& rows);
  void start(Batch& batch);
  void plan_loop();
  void load_loop();

  std::shared_ptr<Reader> reader_;
  std::map<std::int64_t, TableState> tables_;
  std::shared_ptr<EngineShared> shared_;
  pid_t pid_;
  std::atomic<std::uint64_t> next_tag_{1};
  std::atomic<bool> stop_{false};

  std::mutex closing_;  // held by close() throughout
  std::mutex mutex_;    // guards the two queues and, until stop_, loader_
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Batch>> to_plan_;
  std::deque<ScaleMemory*> to_load_;
  std::thread planner_;
  std::thread loader_;
};

}  // namespace engram
