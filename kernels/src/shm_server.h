// The server of the shared-memory channel: lets clients in, and clears up behind them.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "shm_session.h"
#include "shm_socket.h"

namespace engram::shm {

class Server {
 public:
  // Serves at a UNIX SOCK_SEQPACKET socket that listens, which it takes over. Besides the uid of
  // this process and root, `group` may attach. Throws std::system_error.
  Server(Served served, const Limits& limits, const ServerId& id, UniqueFd listener,
         std::optional<gid_t> group);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Answers requests from other tables, from the next on; clients stay attached.
  void reopen(Served served) { serving_.replace(std::move(served)); }
  // Whether all requests that began before that are over.
  bool settled() const { return serving_.settled(); }
  // Refuses new clients and new requests from now on.
  void drain();
  // Whether no request is under way.
  bool idle() const;
  // Gives up what is under way and ends all threads. Any number of times.
  void close();

  struct Counts {
    std::uint64_t clients = 0;
    std::uint64_t bytes = 0;                          // of their memory files
    std::uint64_t requests = 0;                       // since start
    std::uint64_t strangers = 0;                      // came with a uid that may not attach
    std::array<std::uint64_t, kStatuses> failures{};  // of these, not answered with rows
  };
  Counts counts() const;
  const LookupMetrics& lookups() const { return totals_.lookups; }
  // Requests as they are taken up; works on after close().
  Tap& tap() { return totals_.tap; }
  // The first row that could not be what the table holds; empty: none.
  std::string damage() const { return serving_.damage(); }
  // What an operator should know, since the last call: clients that were shown out, and why.
  std::vector<std::string> take_notes();

 private:
  struct Client {
    UniqueFd socket;
    Peer peer;
    Clock::time_point greet_until;
    std::unique_ptr<Session> session{};  // null: it has yet to say hello
    bool gone = false;
  };

  void run();
  void watch(int fd, std::uint32_t events);
  void accept_client();
  void make_room_at_the_door();
  void serve(Client& client);
  void greet(Client& client);
  void attach(Client& client, const Hello& hello, Welcome& welcome);
  void reap();
  void take_out(std::map<int, Client>::iterator client);
  void end_all();
  int wait_ms() const;
  std::uint64_t bytes_used() const;
  void note(const std::string& sentence);

  Serving serving_;
  const Limits limits_;
  const ServerId id_;
  const std::optional<gid_t> group_;
  Totals totals_;
  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd wake_;  // an eventfd: a session has ended, or the server is to

  // Guards what follows. What the door's thread alone changes it reads without, lest others wait
  // while memory is made ready for a client: clients_, and which session a client has.
  mutable std::mutex mutex_;
  std::map<int, Client> clients_;  // by socket
  std::vector<std::string> notes_;

  std::atomic<std::uint64_t> strangers_{0};
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopping_{false};
  std::mutex closing_;  // held by close() throughout
  std::thread thread_;
};

}  // namespace engram::shm
