#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "unique.h"

namespace engram {
namespace {

// Batches up to this many ids are planned on the caller's thread: a decode step must not pay for a
// hand-over.
constexpr std::size_t kInlinePlanIds = 16'384;
// How far ahead of the copy a row's scale bytes are fetched while planning.
constexpr std::size_t kPrefetchRows = 12;

// What one id may cost while its batch is planned and read: id, distinct id, inverse, two reads and
// their errors.
constexpr std::uint64_t kWorkBytesPerId = 8 + 8 + 4 + 2 * (sizeof(ReadItem) + sizeof(std::int32_t));

std::string id_error(std::int64_t layer, std::size_t position, std::size_t column, std::int64_t id,
                     std::uint64_t rows) {
  return "layer " + std::to_string(layer) + ", position " + std::to_string(position) + ", column " +
         std::to_string(column) + ": row id " + std::to_string(id) +
         " is out of range; the table has " + std::to_string(rows) +
         " rows (and -1 asks for a zero row)";
}

}  // namespace

Engine::Engine(std::shared_ptr<Reader> reader, std::vector<Table> tables,
               std::uint64_t budget_bytes)
    : reader_(std::move(reader)),
      shared_(std::make_shared<EngineShared>(budget_bytes)),
      pid_(::getpid()) {
  for (const Table& table : tables) {
    check_fits(table);
    if (!tables_.try_emplace(table.layer).second) {
      throw std::invalid_argument("layer " + std::to_string(table.layer) + " is given twice");
    }
    tables_[table.layer].table = table;
  }
  planner_ = std::thread([this] { plan_loop(); });
}

Engine::~Engine() { close(); }

void Engine::check_fits(const Table& table) const {
  const auto check = [&](const char* name, const Plane& plane, std::size_t row_bytes) {
    const std::string what = "layer " + std::to_string(table.layer) + ": the " + name + " plane ";
    if (plane.file >= reader_->files().size()) {
      throw std::invalid_argument(what + "names file " + std::to_string(plane.file) + " of " +
                                  std::to_string(reader_->files().size()));
    }
    const DataFile& file = reader_->files()[plane.file];
    std::uint64_t end = 0;
    const bool overflow = __builtin_mul_overflow(table.rows - 1, plane.stride, &end) ||
                          __builtin_add_overflow(end, plane.offset, &end) ||
                          __builtin_add_overflow(end, row_bytes, &end);
    if (table.rows == 0 || plane.stride < row_bytes || overflow || end > file.size_bytes()) {
      throw std::invalid_argument(what + "does not fit " + file.path() + " (" +
                                  std::to_string(file.size_bytes()) + " bytes)");
    }
  };
  check("codes", table.codes, code_bytes(table.kind));
  check("scales", table.scales, kScaleBytes);
}

const Engine::TableState& Engine::state_of(std::int64_t layer) const {
  const auto found = tables_.find(layer);
  if (found != tables_.end()) return found->second;
  std::string known;
  for (const auto& [id, state] : tables_) known += (known.empty() ? "" : ", ") + std::to_string(id);
  throw std::invalid_argument("layer " + std::to_string(layer) + " has no table here; there are " +
                              known);
}

std::shared_ptr<Batch> Engine::submit(const std::vector<LayerKeys>& keys, std::size_t positions,
                                      std::size_t width, bool notify) {
  if (::getpid() != pid_) {
    throw std::runtime_error(
        "the engine was opened before a fork and its threads are the parent's; "
        "open the tables again in this process");
  }
  const std::shared_ptr<Batch> batch(new Batch(shared_));
  batch->tag_ = next_tag_.fetch_add(1, std::memory_order_relaxed);
  batch->notify_ = notify;
  batch->positions_ = positions;
  batch->width_ = width;
  // A view may repeat one id more often than memory has bytes: the products must not wrap.
  std::uint64_t ids = 0;
  std::uint64_t bytes = 0;
  bool overflow = __builtin_mul_overflow(positions, width, &ids);
  for (const LayerKeys& layer : keys) {
    const Table& table = state_of(layer.layer).table;
    batch->layers_.emplace_back().table = table;
    std::uint64_t layer_bytes = 0;
    overflow |=
        __builtin_mul_overflow(ids, kWorkBytesPerId + packed_bytes(table.kind), &layer_bytes) ||
        __builtin_add_overflow(bytes, layer_bytes, &bytes);
  }
  if (overflow) {
    throw std::invalid_argument("ids of " + std::to_string(positions) + " positions by " +
                                std::to_string(width) +
                                " columns cannot fit any budget; split them");
  }
  reserve(*batch, bytes);
  copy_ids(*batch, keys);
  const bool inline_plan = ids * keys.size() <= kInlinePlanIds;
  {
    const std::lock_guard lock(mutex_);
    if (stop_.load()) throw std::runtime_error("the engine is closed");
    const std::lock_guard shared_lock(shared_->mutex);
    ++shared_->running;
    batch->self_ = batch;
    if (!inline_plan) {
      to_plan_.push_back(batch);
      wake_.notify_all();
    }
  }
  if (inline_plan) plan(*batch);
  return {batch.get(), [batch](Batch*) { batch->cancel(); }};
}

void Engine::reserve(Batch& batch, std::uint64_t bytes) const {
  if (bytes > shared_->budget_bytes) {
    throw std::invalid_argument(
        "a batch that may need " + std::to_string(bytes) + " bytes cannot fit the budget of " +
        std::to_string(shared_->budget_bytes) + " bytes; split it or raise the budget");
  }
  std::uint64_t used = shared_->in_flight_bytes.load();
  do {
    if (bytes > shared_->budget_bytes - used) {
      throw Overloaded("batches in flight hold " + std::to_string(used) + " of the budget of " +
                       std::to_string(shared_->budget_bytes) + " bytes; this one may need " +
                       std::to_string(bytes) + ": try again, or raise the budget");
    }
  } while (!shared_->in_flight_bytes.compare_exchange_weak(used, used + bytes));
  batch.reserved_bytes_ = bytes;
}

void Engine::copy_ids(Batch& batch, const std::vector<LayerKeys>& keys) const {
  for (std::size_t l = 0; l < keys.size(); ++l) {
    const LayerKeys& from = keys[l];
    Batch::LayerRows& to = batch.layers_[l];
    to.ids.resize(batch.positions_ * batch.width_);
    std::int64_t* out = to.ids.data();
    for (std::size_t position = 0; position < batch.positions_; ++position) {
      const std::int64_t* const row =
          from.ids + static_cast<std::int64_t>(position) * from.position_stride;
      for (std::size_t column = 0; column < batch.width_; ++column) {
        const std::int64_t id = row[static_cast<std::int64_t>(column) * from.column_stride];
        // As unsigned, -1 + 1 is 0 and everything below wraps beyond any row count.
        if (static_cast<std::uint64_t>(id) + 1 > to.table.rows) {
          throw std::invalid_argument(id_error(from.layer, position, column, id, to.table.rows));
        }
        *out++ = id;
      }
    }
  }
}

// Dedupes, lays out the packed rows and builds the reads; then starts them.
void Engine::plan(Batch& batch) {
  if (batch.job_.cancelled.load(std::memory_order_relaxed)) return batch.fail_unread();
  try {
    std::size_t packed_total = 0;
    for (Batch::LayerRows& rows : batch.layers_) {
      rows.inverse.resize(rows.ids.size());
      unique_ids(rows.ids, rows.distinct, rows.inverse.data());
      batch.stats_.rows += rows.ids.size();
      batch.stats_.distinct += rows.distinct.size();
      packed_total += rows.distinct.size() * packed_bytes(rows.table.kind);
      rows.ids = {};
    }
    batch.arena_ = std::make_unique_for_overwrite<std::byte[]>(packed_total);
    batch.items_.reserve(batch.stats_.distinct * 2);
    std::byte* packed = batch.arena_.get();
    for (Batch::LayerRows& rows : batch.layers_) {
      rows.packed = packed;
      packed += rows.distinct.size() * packed_bytes(rows.table.kind);
      plan_layer(batch, rows);
    }
    start(batch);
  } catch (const std::exception&) {
    // Out of memory, or the reader was closed.
    batch.fail_unread();
  }
}

void Engine::plan_layer(Batch& batch, Batch::LayerRows& rows) {
  const Table& table = rows.table;
  const std::size_t codes = code_bytes(table.kind);
  const ScaleMemory* const scales = state_of(table.layer).scales.load(std::memory_order_acquire);
  const auto loaded = static_cast<std::int64_t>(scales == nullptr ? 0 : scales->rows_loaded());
  const auto add = [&](const Plane& plane, std::uint64_t row, std::byte* dest, std::size_t length) {
    const std::uint64_t offset = plane.offset + row * plane.stride;
    batch.stats_.read_bytes +=
        aligned_span(offset, length, reader_->files()[plane.file].alignment());
    batch.items_.push_back({.offset = offset,
                            .dest = dest,
                            .file = plane.file,
                            .length = static_cast<std::uint32_t>(length)});
  };
  std::byte* dest = rows.packed;
  for (std::size_t i = 0; i < rows.distinct.size(); ++i, dest += packed_bytes(table.kind)) {
    const std::int64_t row = rows.distinct[i];
    if (i + kPrefetchRows < rows.distinct.size() && rows.distinct[i + kPrefetchRows] < loaded) {
      __builtin_prefetch(scales->of(static_cast<std::uint64_t>(rows.distinct[i + kPrefetchRows])));
    }
    add(table.codes, static_cast<std::uint64_t>(row), dest, codes);
    if (row < loaded) {
      std::memcpy(dest + codes, scales->of(static_cast<std::uint64_t>(row)), kScaleBytes);
    } else {
      add(table.scales, static_cast<std::uint64_t>(row), dest + codes, kScaleBytes);
    }
  }
}

void Engine::start(Batch& batch) {
  batch.stats_.reads = batch.items_.size();
  if (batch.items_.empty()) {
    batch.finish();
    return;
  }
  batch.errors_.assign(batch.items_.size(), 0);
  batch.job_.items = batch.items_;
  batch.job_.errors = batch.errors_;
  batch.job_.finished = [&batch] { batch.finish(); };
  reader_->submit(batch.job_);
}

void Engine::plan_loop() {
  while (true) {
    std::shared_ptr<Batch> batch;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_.load() || !to_plan_.empty(); });
      if (to_plan_.empty()) return;
      batch = std::move(to_plan_.front());
      to_plan_.pop_front();
    }
    plan(*batch);
  }
}

std::vector<std::uint64_t> Engine::take_completions() {
  const std::lock_guard lock(shared_->mutex);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t drained = ::read(shared_->event_fd, &count, sizeof count);
  return std::exchange(shared_->completions, {});
}

void Engine::load_scales(std::int64_t layer) {
  TableState& state = const_cast<TableState&>(state_of(layer));
  const Plane& plane = state.table.scales;
  if (plane.stride != kScaleBytes) {
    throw std::invalid_argument("layer " + std::to_string(layer) +
                                ": its scales are not contiguous; they are read with their rows");
  }
  const std::lock_guard lock(mutex_);
  if (stop_.load()) throw std::runtime_error("the engine is closed");
  if (state.scales_owner) return;
  // First of all: scales without a thread would never load, and look as if they might.
  if (!loader_.joinable()) loader_ = std::thread([this] { load_loop(); });
  state.scales_owner =
      std::make_unique<ScaleMemory>(reader_->files()[plane.file], plane.offset, state.table.rows);
  state.scales.store(state.scales_owner.get(), std::memory_order_release);
  to_load_.push_back(state.scales_owner.get());
  wake_.notify_all();
}

void Engine::load_loop() {
  while (true) {
    ScaleMemory* scales;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_.load() || !to_load_.empty(); });
      if (stop_.load()) return;
      scales = to_load_.front();
      to_load_.pop_front();
    }
    scales->load(stop_);
  }
}

Engine::ScaleProgress Engine::scale_progress(std::int64_t layer) const {
  const TableState& state = state_of(layer);
  const ScaleMemory* const scales = state.scales.load(std::memory_order_acquire);
  if (scales == nullptr) return {.loaded = 0, .rows = state.table.rows, .error = ""};
  return {.loaded = scales->rows_loaded(), .rows = state.table.rows, .error = scales->error()};
}

void Engine::close() {
  if (::getpid() != pid_) return;  // the threads are the parent's
  const std::lock_guard closing(closing_);
  {
    const std::lock_guard lock(mutex_);
    stop_.store(true);
    wake_.notify_all();
  }
  // The planner ends what it was given before it leaves.
  if (planner_.joinable()) planner_.join();
  if (loader_.joinable()) loader_.join();
  std::unique_lock lock(shared_->mutex);
  shared_->idle.wait(lock, [&] { return shared_->running == 0; });
}

}  // namespace engram
