#include "engine.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <new>
#include <system_error>
#include <utility>

#include "hits.h"

namespace engram {
namespace {

// Room in the budget comes with the next batch that is dropped: soon, but nobody knows when.
constexpr double kBudgetRetryS = 0.05;

}  // namespace

Engine::Engine(std::shared_ptr<Reader> reader, std::vector<Table> tables,
               std::uint64_t budget_bytes, std::uint64_t cache_bytes)
    : reader_(std::move(reader)),
      shared_(
          std::make_shared<EngineShared>(*reader_, std::move(tables), budget_bytes, cache_bytes)),
      pid_(::getpid()) {
  for (std::size_t i = 0; i < shared_->tables.count(); ++i) check_fits(shared_->tables[i].table);
}

Engine::~Engine() { close(); }

void Engine::check_fits(const Table& table) const {
  const auto check = [&](const std::string& name, std::uint32_t file_number, std::uint64_t offset,
                         std::uint64_t units, std::uint64_t stride, std::size_t unit_bytes) {
    const std::string what = "layer " + std::to_string(table.layer) + ": the " + name + " ";
    if (file_number >= reader_->files().size()) {
      throw std::invalid_argument(what + "names file " + std::to_string(file_number) + " of " +
                                  std::to_string(reader_->files().size()));
    }
    const DataFile& file = reader_->files()[file_number];
    std::uint64_t end = 0;
    const bool overflow = __builtin_mul_overflow(units - 1, stride, &end) ||
                          __builtin_add_overflow(end, offset, &end) ||
                          __builtin_add_overflow(end, unit_bytes, &end);
    if (stride < unit_bytes || overflow || end > file.size_bytes()) {
      throw std::invalid_argument(what + "does not fit " + file.path() + " (" +
                                  std::to_string(file.size_bytes()) + " bytes)");
    }
  };
  for (const TableCopy& copy : table.copies) {
    if (copy.pages) {
      const std::uint64_t pages = RecordFormat::of(table.kind).pages_of(table.rows);
      check("packed table", copy.pages->file, copy.pages->offset, pages, kPageBytes, kPageBytes);
      continue;
    }
    const auto& [codes, scales] = copy.planes;
    check("codes plane", codes.file, codes.offset, table.rows, codes.stride,
          code_bytes(table.kind));
    check("scales plane", scales.file, scales.offset, table.rows, scales.stride, kScaleBytes);
  }
}

void Engine::check_process() const {
  if (::getpid() == pid_) return;
  throw std::runtime_error(
      "the engine was opened before a fork and its threads are the parent's; "
      "open the tables again in this process");
}

std::size_t Engine::gathered_bytes(const std::vector<LayerKeys>& keys, const Order& order,
                                   Format format) const {
  std::size_t row_bytes = 0;
  for (const LayerKeys& layer : keys) {
    const Table& table = shared_->tables[shared_->tables.number_of(layer.layer)].table;
    const std::size_t bytes = output_bytes(table.kind, format);
    if (row_bytes != 0 && bytes != row_bytes) throw std::invalid_argument(kNoCommonForm);
    row_bytes = bytes;
  }
  // A view may repeat one id more often than memory has bytes: the products must not wrap.
  // Columns first: positions without any may be as many as they like.
  std::size_t bytes = keys.size() * row_bytes;
  if (__builtin_mul_overflow(bytes, order.columns.count(), &bytes) ||
      __builtin_mul_overflow(bytes, order.positions, &bytes)) {
    throw std::invalid_argument(std::to_string(order.positions) + " positions by " +
                                std::to_string(order.columns.count()) +
                                " columns are more rows than any memory holds; split them");
  }
  return bytes;
}

std::optional<BatchStats> Engine::copy_hits(const std::vector<LayerKeys>& keys, const Order& order,
                                            Format format, std::byte* out) {
  check_process();
  if (stop_.load()) throw std::runtime_error("the engine is closed");
  if (shared_->cache == nullptr || order.columns.count() == 0) return std::nullopt;
  for (const LayerKeys& layer : keys) {
    const TableState& state = shared_->tables[shared_->tables.number_of(layer.layer)];
    if (state.resident_rows() != nullptr) return std::nullopt;
  }
  const std::uint64_t request = next_tag_.fetch_add(1, std::memory_order_relaxed);
  HitCopier copier(*shared_, hash_, keys, order.columns, order.positions, format, request);
  const std::int64_t began_ns = now_ns();
  const std::optional<BatchStats> stats = copier.copy(out);
  if (stats) {
    shared_->converted.add(format, now_ns() - began_ns, copier.bytes());
    shared_->cache->counters().hits.fetch_add(stats->groups, std::memory_order_relaxed);
    shared_->totals_of(order.lane).add(*stats);
    if (order.admission) order.admission->planned(stats->rows, 0, now_ns());
  }
  return stats;
}

std::shared_ptr<Batch> Engine::submit(const std::vector<LayerKeys>& keys, const Order& order) {
  check_process();
  const std::uint64_t bytes = bytes_of(keys, order);
  const std::shared_ptr<Batch> batch(
      new Batch(shared_, next_tag_.fetch_add(1, std::memory_order_relaxed)));
  batch->notify_ = order.notify;
  batch->on_done_ = order.on_done;
  batch->lane_ = order.lane;
  batch->positions_ = order.positions;
  batch->columns_ = order.columns;
  batch->admission_ = order.admission;
  if (order.deadline_s) {
    const std::chrono::duration<double> from_now(*order.deadline_s);
    batch->wanted_.set_deadline(std::chrono::duration_cast<std::chrono::nanoseconds>(from_now));
  }
  reserve(*batch, bytes);
  batch->layers_.reserve(keys.size());
  Planner planner(*batch, hash_);
  for (const LayerKeys& layer : keys) planner.add(layer);
  reserve(*batch, planner.split_bytes());
  {
    const std::lock_guard lock(shared_->mutex);
    if (stop_.load()) throw std::runtime_error("the engine is closed");
    ++shared_->running;
    batch->self_ = batch;
  }
  try {
    planner.look_up();
    batch->tell_planned();
    if (!batch->to_read_.empty()) {
      reader_->submit(*batch, batch->lane_);
    } else {
      batch->part_done();
    }
  } catch (const std::bad_alloc&) {
    batch->fail_all(ENOMEM);
    batch->part_done();
  } catch (const std::runtime_error&) {  // the reader was closed
    batch->fail_all(ECANCELED);
    batch->part_done();
  }
  if (!populating_.load(std::memory_order_relaxed) && shared_->cache != nullptr &&
      shared_->cache->wants_memory()) {
    populate_cache();
  }
  return {batch.get(), [batch](Batch*) { batch->cancel(); }};
}

std::vector<std::uint32_t> Engine::failed_files() const {
  std::vector<std::uint32_t> files;
  for (std::uint32_t file = 0; file < shared_->failed_files.size(); ++file) {
    if (shared_->failed_files[file].load(std::memory_order_relaxed)) files.push_back(file);
  }
  return files;
}

void Engine::populate_cache() {
  RowCache* const cache = shared_->cache.get();
  if (cache == nullptr || populating_.exchange(true)) return;
  const std::lock_guard lock(mutex_);
  if (stop_.load()) return;
  try {
    populator_ = std::thread([this, cache] { cache->populate(stop_); });
  } catch (const std::system_error&) {
    // Without a thread to spare, slots are made ready as they are used.
  }
}

std::uint64_t Engine::bytes_of(const std::vector<LayerKeys>& keys, const Order& order) const {
  // A view may repeat one id more often than memory has bytes: the products must not wrap.
  std::uint64_t total = 0;
  std::uint64_t groups = 0;
  bool overflow = __builtin_mul_overflow(order.positions, order.columns.groups(), &groups);
  for (const LayerKeys& layer : keys) {
    const Table& table = shared_->tables[shared_->tables.number_of(layer.layer)].table;
    const std::uint64_t rows = order.columns.group_rows * packed_bytes(table.kind);
    std::uint64_t bytes = 0;
    overflow |= __builtin_mul_overflow(groups, Planner::work_bytes() + rows, &bytes) ||
                __builtin_add_overflow(total, bytes, &total);
  }
  if (overflow) {
    throw std::invalid_argument("ids of " + std::to_string(order.positions) + " positions by " +
                                std::to_string(order.columns.count()) +
                                " columns cannot fit any budget; split them");
  }
  return total;
}

void Engine::reserve(Batch& batch, std::uint64_t bytes) const {
  const std::uint64_t budget = limit_of(batch.lane_, shared_->budget_bytes);
  if (bytes > budget) {
    throw std::invalid_argument("a batch that may need " + std::to_string(bytes) +
                                " bytes cannot fit the budget of " + std::to_string(budget) +
                                " bytes; split it or raise the budget");
  }
  std::uint64_t used = shared_->in_flight_bytes.load();
  do {
    if (used > budget || bytes > budget - used) {
      throw Overloaded(OverloadLimit::budget, kBudgetRetryS,
                       "batches in flight hold " + std::to_string(used) + " of the budget of " +
                           std::to_string(budget) + " bytes; this one may need " +
                           std::to_string(bytes) + ": try again, or raise the budget");
    }
  } while (!shared_->in_flight_bytes.compare_exchange_weak(used, used + bytes));
  batch.reserved_bytes_ += bytes;
}

std::vector<std::uint64_t> Engine::take_completions() {
  const std::lock_guard lock(shared_->mutex);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t drained = ::read(shared_->event_fd, &count, sizeof count);
  return std::exchange(shared_->completions, {});
}

template <typename Memory>
void Engine::load(std::unique_ptr<Memory>& owner, std::atomic<Memory*>& seen,
                  const std::function<std::unique_ptr<Memory>()>& make) {
  const std::lock_guard lock(mutex_);
  if (stop_.load()) throw std::runtime_error("the engine is closed");
  if (owner) return;
  // First of all: what is to be loaded without a thread would never be, and look as if it might.
  start_loader();
  owner = make();
  seen.store(owner.get(), std::memory_order_release);
  to_load_.push_back([this, memory = owner.get()] { memory->load(stop_); });
}

// With the lock held, which the thread needs to go on.
void Engine::start_loader() {
  if (!loader_.joinable()) loader_ = std::thread([this] { load_loop(); });
  wake_.notify_all();
}

void Engine::load_scales(std::int64_t layer) {
  TableState& state = shared_->tables[shared_->tables.number_of(layer)];
  const TableCopy& copy = state.table.copies.front();
  if (copy.pages || copy.planes.scales.stride != kScaleBytes) {
    throw std::invalid_argument("layer " + std::to_string(layer) +
                                ": its scales are not contiguous; they are read with their rows");
  }
  const Plane& plane = copy.planes.scales;
  load<ScaleMemory>(state.scales_owner, state.scales, [&] {
    return std::make_unique<ScaleMemory>(reader_->files()[plane.file], plane.offset,
                                         state.table.rows);
  });
}

void Engine::load_resident(std::int64_t layer) {
  TableState& state = shared_->tables[shared_->tables.number_of(layer)];
  load<ResidentRows>(state.resident_owner, state.resident,
                     [&] { return std::make_unique<ResidentRows>(reader_->files(), state.table); });
}

void Engine::load_loop() {
  while (true) {
    std::function<void()> load;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_.load() || !to_load_.empty(); });
      if (stop_.load()) return;
      load = std::move(to_load_.front());
      to_load_.pop_front();
    }
    load();
  }
}

LoadProgress Engine::scale_progress(std::int64_t layer) const {
  const TableState& state = shared_->tables[shared_->tables.number_of(layer)];
  const ScaleMemory* const memory = state.scales.load(std::memory_order_acquire);
  if (memory == nullptr) return {.loaded = 0, .rows = state.table.rows, .error = ""};
  return {.loaded = memory->rows_loaded(), .rows = state.table.rows, .error = memory->error()};
}

LoadProgress Engine::resident_progress(std::int64_t layer) const {
  const TableState& state = shared_->tables[shared_->tables.number_of(layer)];
  const ResidentRows* const memory = state.resident.load(std::memory_order_acquire);
  if (memory == nullptr) return {.loaded = 0, .rows = state.table.rows, .error = ""};
  return {.loaded = memory->rows_loaded(), .rows = state.table.rows, .error = memory->error()};
}

void Engine::close() {
  if (::getpid() != pid_) return;  // the threads are the parent's
  const std::lock_guard closing(closing_);
  {
    const std::lock_guard lock(mutex_);
    const std::lock_guard shared_lock(shared_->mutex);
    stop_.store(true);
    wake_.notify_all();
  }
  for (std::thread* const thread : {&loader_, &populator_}) {
    if (thread->joinable()) thread->join();
  }
  std::unique_lock lock(shared_->mutex);
  shared_->idle.wait(lock, [&] { return shared_->running == 0; });
}

}  // namespace engram
