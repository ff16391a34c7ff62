// What waits to be read, and who goes first: sources of reads in three lanes, handed to io threads
// within what each device may have in flight.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "metrics.h"
#include "read.h"

namespace engram {

// Reads handed to a lane in a row while a lower one waits; then the lower one gets a turn, lest it
// starve. Of what a busy device reads, 1 in kLaneRun / kTurnReads is bulk's at least.
inline constexpr unsigned kLaneRun = 256;
// Reads taken from one source before it is the next one's turn.
inline constexpr std::size_t kTurnReads = 16;

// Reads in flight on each device that holds files of a reader, and what it may have. A device is
// deep enough at its knee: deeper queues only add latency. Bulk lanes stay below that, so that a
// decode step finds room and a short queue.
class Devices {
 public:
  Devices(const std::vector<DataFile>& files, unsigned depth, unsigned bulk_depth);

  bool has_room(std::uint32_t file, Lane lane) const;
  // On any device.
  bool has_room(Lane lane) const;
  // Of the file's device, all lanes.
  unsigned in_flight(std::uint32_t file) const;
  void started(std::uint32_t file, Lane lane);
  void ended(std::uint32_t file, Lane lane);

  const DataFile& file(std::uint32_t number) const { return files_[number]; }
  std::size_t count() const { return count_; }
  // For backends whose threads hold reads that the device does not see yet.
  void raise_depth(unsigned factor);

 private:
  struct Device {
    std::atomic<unsigned> all{0};
    std::atomic<unsigned> bulk{0};
  };
  bool has_room(const Device& device, Lane lane) const;
  const std::vector<DataFile>& files_;
  std::vector<std::uint32_t> device_of_file_;
  std::unique_ptr<Device[]> devices_;
  std::size_t count_ = 0;
  unsigned depth_;
  unsigned bulk_depth_;
};

// The room that devices have for one lane's reads.
class Room {
 public:
  Room(Devices& devices, Lane lane) : devices_(devices), lane_(lane) {}

  // Takes the room of one read, if there is some.
  bool take(std::uint32_t file) {
    if (!devices_.has_room(file, lane_)) return false;
    devices_.started(file, lane_);
    return true;
  }
  bool has(std::uint32_t file) const { return devices_.has_room(file, lane_); }
  unsigned in_flight(std::uint32_t file) const { return devices_.in_flight(file); }
  std::uint32_t alignment(std::uint32_t file) const { return devices_.file(file).alignment(); }

 private:
  Devices& devices_;
  Lane lane_;
};

// Something that has reads to make, one after another.
class ReadSource {
 public:
  virtual ~ReadSource() = default;

  // Writes the next reads into `out`, as many as it has and as there is room for, and returns their
  // number. By one thread at a time, under the queue's lock: it must not wait.
  virtual std::size_t next(std::span<Read> out, Room& room) = 0;
  virtual bool exhausted() const = 0;
  // Whether the reads not handed out yet should be given up: give_up() is then called, without the
  // lock, and returns whether some must be read all the same.
  virtual bool wants_out() const { return false; }
  virtual bool give_up() { return false; }
  // The queue holds it no more. Without the lock.
  virtual void left_queue() {}
  // Once for every read handed out, on any thread. Without an error, `bytes` holds what was read
  // until this returns.
  virtual void ended(const Read& read, std::int32_t error, const std::byte* bytes) = 0;

 private:
  friend class ReadQueue;
  std::int64_t pushed_ns_ = 0;
};

// A read in an io thread's hands.
struct Claimed {
  ReadSource* source = nullptr;
  Read read;
  Lane lane = Lane::decode;
  std::int64_t claimed_ns = 0;
};

// An io thread that sleeps in the kernel, with a descriptor that wakes it.
struct Sleeper {
  int event_fd = -1;
  bool asleep = false;  // guarded by the queue
};

class ReadQueue {
 public:
  ReadQueue(Devices& devices, ReadMetrics& metrics) : devices_(devices), metrics_(metrics) {}

  // The source must live until left_queue().
  void push(ReadSource& source, Lane lane);
  // Takes up to out.size() reads without waiting. When that finds fewer, `sleeper` is woken by the
  // next push.
  std::size_t claim(std::span<Claimed> out, Sleeper* sleeper);
  // Waits for reads; 0 = the queue has stopped, and holds none.
  std::size_t wait_and_claim(std::span<Claimed> out);
  // The device is done with a read, or never saw it.
  void ended(const Claimed& claimed) { devices_.ended(claimed.read.file, claimed.lane); }
  // Returns an unread claim, to be claimed again by whoever comes next.
  void give_back(const Claimed& claimed);

  void add(Sleeper& sleeper);
  void remove(Sleeper& sleeper);

  bool stopped() const;
  // Lets the queue run dry, until start() (a backend that failed to come up stops the queue for the
  // threads it had).
  void stop();
  void start();

 private:
  struct LaneQueue {
    std::deque<ReadSource*> sources;
    unsigned run = 0;  // reads handed out since a lower lane, waiting, had its turn
  };
  struct Leaving {
    ReadSource* source;
    Lane lane;
    bool exhausted;
  };

  std::size_t take(std::span<Claimed> out, std::vector<Leaving>& leaving);
  std::size_t take_given_back(std::span<Claimed> out);
  void stamp(std::span<Claimed> claimed, std::size_t given_back);
  std::size_t take_from(Lane lane, std::span<Claimed> out, std::vector<Leaving>& leaving);
  std::array<Lane, kLanes> order() const;
  void count_run(Lane lane, std::size_t reads);
  bool dismiss(const std::vector<Leaving>& leaving);
  bool has_work() const;
  void wake_one();

  Devices& devices_;
  ReadMetrics& metrics_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::array<LaneQueue, kLanes> lanes_;
  std::vector<Claimed> given_back_;
  std::vector<Sleeper*> sleepers_;
  std::uint64_t calls_ = 0;  // for a thread that waits
  unsigned waiting_ = 0;
  bool stopped_ = false;
};

}  // namespace engram
