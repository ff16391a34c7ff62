// The client of the shared-memory channel: slots, room in the data area, requests and their
// answers.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "shm_extents.h"
#include "shm_memory.h"
#include "shm_socket.h"

namespace engram::shm {

// The server has ended, or ended this client; or the client was closed.
class Lost : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The server does not let this client in, and says why.
class NotWelcome : public std::runtime_error {
 public:
  NotWelcome(Status status, const std::string& sentence)
      : std::runtime_error(sentence), status(status) {}
  Status status;
};

// What is asked for.
struct Call {
  Entry entry{};                                   // but for slot, serial, offsets and byte counts
  std::vector<std::span<const std::byte>> keys{};  // one behind the other
  std::uint64_t payload_bytes = 0;                 // of the rows
  std::uint64_t mask_bytes = 0;
};

class Client;

// A request and the part of the data area that is its own: from submit() until it is released or
// dropped, even when the server has ended. Safe to share between threads: one may release what
// others wait for.
class Ticket {
 public:
  Ticket(std::shared_ptr<Client> client, std::uint32_t slot, std::uint32_t serial,
         std::uint64_t offset, std::uint64_t bytes, const Call& call);
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // Waits for the answer, `spin` of it without sleeping; false when `until` came first. Throws
  // Lost, std::logic_error once it is released.
  bool wait(std::chrono::steady_clock::time_point until, std::chrono::nanoseconds spin);
  // The rest needs a wait() that returned true.
  Status status() const { return answer_.status; }
  std::string message() const { return {answer_.message.data(), answer_.message_bytes}; }
  const Completion& answer() const { return answer_; }
  // Rows and mask, where the server wrote them.
  std::span<std::byte> rows() const;
  std::span<std::byte> mask() const;
  // Gives slot and memory back: what rows() and mask() gave is not to be used any more. A request
  // without an answer is cancelled first.
  void release();

 private:
  friend class Client;
  std::shared_ptr<Client> client() const;

  const std::uint32_t slot_;
  const std::uint32_t serial_;
  const std::uint64_t offset_;
  const std::uint64_t bytes_;
  const std::uint64_t payload_bytes_;
  const std::uint64_t mask_bytes_;

  mutable std::mutex mutex_;        // guards what follows
  std::shared_ptr<Client> client_;  // null: released
  bool done_ = false;
  Completion answer_;  // of anybody who has waited for it
};

// Safe to share between threads; not usable in a forked child.
class Client : public std::enable_shared_from_this<Client> {
 public:
  // Asks for a data area of so many bytes; fewer may be granted. Throws std::system_error when
  // nobody serves there, NotWelcome, and std::runtime_error for a server that makes no sense.
  static std::shared_ptr<Client> attach(const std::string& path, std::uint64_t data_bytes,
                                        std::chrono::milliseconds at_most);

  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const ServerId& server_id() const { return server_id_; }
  std::span<std::byte> data() const { return memory_.data(); }
  bool alive() const { return !closed_.load() && connected(socket_.get()); }

  // Waits for a slot and for room, then puts the request into the ring. Null when `until` came
  // first. Throws Lost, std::invalid_argument for what no data area of this size holds.
  std::shared_ptr<Ticket> submit(const Call& call, std::chrono::steady_clock::time_point until);
  // Takes no more requests; the memory stays until the last ticket has gone.
  void close();

 private:
  friend class Ticket;
  // A ticket that was dropped before its answer: the server may still write to its memory.
  struct Abandoned {
    std::uint32_t slot, serial;
    std::uint64_t offset, bytes;
  };

  Client(UniqueFd socket, Memory memory, const ServerId& id);
  void publish(const Entry& entry);
  void leave(const Ticket& ticket);
  void give_back(const Abandoned& part);
  bool answered(std::uint32_t slot, std::uint32_t serial) const;
  void reap();

  UniqueFd socket_;
  Memory memory_;
  ServerId server_id_;
  pid_t pid_;
  std::atomic<bool> closed_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable room_;
  Extents extents_;
  std::vector<std::uint32_t> free_slots_;
  std::vector<Abandoned> abandoned_;
  std::uint32_t submitted_ = 0;  // entries
  std::uint32_t serial_ = 0;
};

}  // namespace engram::shm
