#include "shm_server.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

namespace engram::shm {
namespace {

// Who connects has so long to say hello, and so many may be about to: the next one takes the place
// of who has been silent longest.
constexpr std::chrono::seconds kGreeting{5};
constexpr std::size_t kGreetingsMax = 32;
constexpr std::size_t kNotesMax = 8;  // a client that comes again and again shall not fill a log
// When the process has no descriptor or no memory left for a client that waits at the door.
constexpr std::chrono::milliseconds kNothingLeft{20};

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::string mib(std::uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

Server::Server(Served served, const Limits& limits, const ServerId& id, UniqueFd listener,
               std::optional<gid_t> group)
    : serving_(std::move(served)),
      limits_(limits),
      id_(id),
      group_(group),
      listener_(std::move(listener)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!epoll_ || !wake_) fail("no descriptors for shared memory");
  // A client that has left the line before it is let in must not make the door wait.
  const int flags = ::fcntl(listener_.get(), F_GETFL);
  if (::fcntl(listener_.get(), F_SETFL, flags | O_NONBLOCK) != 0) fail("the socket to listen at");
  watch(listener_.get(), EPOLLIN);
  watch(wake_.get(), EPOLLIN);
  thread_ = std::thread([this] { run(); });
}

Server::~Server() { close(); }

void Server::watch(int fd, std::uint32_t events) {
  epoll_event event{.events = events, .data = {.fd = fd}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll");
}

void Server::drain() {
  draining_.store(true);
  const std::lock_guard lock(mutex_);
  for (auto& [fd, client] : clients_) {
    if (client.session) client.session->drain();
  }
}

bool Server::idle() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(clients_, [](const auto& entry) {
    return !entry.second.session || entry.second.session->idle();
  });
}

void Server::close() {
  const std::lock_guard closing(closing_);
  stopping_.store(true);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

Server::Counts Server::counts() const {
  const std::lock_guard lock(mutex_);
  Counts counts{.requests = totals_.requests.load(), .strangers = strangers_.load()};
  for (std::size_t i = 0; i < kStatuses; ++i) counts.failures[i] = totals_.failures[i].load();
  for (const auto& [fd, client] : clients_) {
    if (!client.session) continue;
    ++counts.clients;
    counts.bytes += client.session->memory().file_bytes();
  }
  return counts;
}

std::vector<std::string> Server::take_notes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(notes_, {});
}

void Server::note(const std::string& sentence) {
  const std::lock_guard lock(mutex_);
  if (notes_.size() < kNotesMax) notes_.push_back(sentence);
}

// ---------------------------------------------------------------------------------- the door

void Server::run() {
  ::pthread_setname_np(::pthread_self(), "engram-shm-door");
  std::array<epoll_event, 16> events;
  while (!stopping_.load()) {
    const int count =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms());
    for (int i = 0; i < count; ++i) {
      const int fd = events[static_cast<std::size_t>(i)].data.fd;
      if (fd == listener_.get()) {
        accept_client();
      } else if (fd != wake_.get()) {
        if (const auto found = clients_.find(fd); found != clients_.end()) serve(found->second);
      }
    }
    reap();
  }
  end_all();
}

// Until the next client that has said nothing is shown out.
int Server::wait_ms() const {
  Clock::time_point until = Clock::time_point::max();
  for (const auto& [fd, client] : clients_) {
    if (!client.session) until = std::min(until, client.greet_until);
  }
  if (until == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
  return static_cast<int>(std::max<std::int64_t>(0, left.count()));
}

void Server::accept_client() {
  UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    // It stays in line, and would be reported again at once.
    if (errno != EAGAIN) std::this_thread::sleep_for(kNothingLeft);
    return;
  }
  make_room_at_the_door();
  try {
    const Peer peer = peer_of(socket.get(), group_);
    const int fd = socket.get();
    watch(fd, EPOLLIN | EPOLLRDHUP);
    const std::lock_guard lock(mutex_);
    clients_.emplace(
        fd,
        Client{.socket = std::move(socket), .peer = peer, .greet_until = Clock::now() + kGreeting});
  } catch (const std::exception&) {
    // Without memory for one more client, it is hung up on.
  }
}

// Who means to attach says hello at once, so nobody who does is kept out by those who do not.
void Server::make_room_at_the_door() {
  std::size_t greeting = 0;
  Client* longest = nullptr;
  for (auto& [fd, client] : clients_) {
    if (client.session || client.gone) continue;
    ++greeting;
    if (longest == nullptr || client.greet_until < longest->greet_until) longest = &client;
  }
  if (greeting >= kGreetingsMax) longest->gone = true;
}

// Something came from a client: its hello; afterwards nothing should, so it is the end.
void Server::serve(Client& client) {
  if (client.gone) return;
  if (client.session) {
    client.gone = true;
    client.session->leave();
    // It would be reported again until the session has ended.
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, client.socket.get(), nullptr);
  } else {
    greet(client);
  }
}

void Server::greet(Client& client) {
  Hello hello;
  if (!receive_hello(client.socket.get(), hello)) {
    client.gone = true;
    return;
  }
  Welcome welcome{.server_id = id_};
  try {
    attach(client, hello, welcome);
    return;
  } catch (const Refusal& refusal) {
    welcome.status = refusal.status;
    const std::string sentence = refusal.what();
    const std::size_t length = std::min(sentence.size(), welcome.message.size());
    std::memcpy(welcome.message.data(), sentence.data(), length);
    welcome.message_bytes = static_cast<std::uint32_t>(length);
    note("process " + std::to_string(client.peer.pid) + " (uid " + std::to_string(client.peer.uid) +
         ") was not let in: " + sentence);
  }
  send_welcome(client.socket.get(), welcome, -1);
  client.gone = true;
}

// Throws Refusal.
void Server::attach(Client& client, const Hello& hello, Welcome& welcome) {
  if (!client.peer.may_attach(::geteuid())) {
    strangers_.fetch_add(1);
    throw Refusal(Status::permission_denied,
                  "uid " + std::to_string(client.peer.uid) +
                      " may not attach: start the server with --shm-group for a group of it");
  }
  if (hello.version != kVersion) {
    throw Refusal(Status::failed_precondition,
                  "the client speaks version " + std::to_string(hello.version) +
                      " of the shared-memory channel, this server version " +
                      std::to_string(kVersion));
  }
  if (draining_.load()) throw Refusal(Status::unavailable, "the server is shutting down");
  const auto attached = std::ranges::count_if(
      clients_, [](const auto& entry) { return entry.second.session != nullptr; });
  if (static_cast<std::uint64_t>(attached) >= limits_.clients) {
    throw Refusal(
        Status::resource_exhausted,
        std::to_string(attached) + " clients are attached, all that --shm-clients allows");
  }
  const std::uint64_t most = std::max(limits_.client_bytes, kDataBytesMin);
  const std::uint64_t granted = std::clamp(hello.data_bytes, kDataBytesMin, most);
  const std::uint64_t used = bytes_used();
  if (used + granted > limits_.bytes) {
    throw Refusal(Status::resource_exhausted,
                  "clients hold " + mib(used) + " of the " + mib(limits_.bytes) +
                      " that --shm-bytes allows; this one asks for " + mib(granted));
  }
  try {
    Memory memory = Memory::create(granted);
    const UniqueFd file = memory.take_fd();
    welcome.file_bytes = memory.file_bytes();
    const auto on_end = [this] {
      const std::uint64_t one = 1;
      [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
    };
    auto session = std::make_unique<Session>(serving_, limits_, totals_, std::move(memory), on_end);
    session->start();
    {
      const std::lock_guard lock(mutex_);
      client.session = std::move(session);
      if (draining_.load()) client.session->drain();
    }
    if (!send_welcome(client.socket.get(), welcome, file.get())) {
      client.gone = true;
      client.session->leave();
    }
  } catch (const std::system_error& error) {
    throw Refusal(Status::resource_exhausted, error.what());
  } catch (const std::bad_alloc&) {
    throw Refusal(Status::resource_exhausted, "the server has no memory for another client");
  }
}

std::uint64_t Server::bytes_used() const {
  std::uint64_t bytes = 0;
  for (const auto& [fd, client] : clients_) {
    if (client.session) bytes += client.session->memory().data().size();
  }
  return bytes;
}

// Clients that are over: sessions that have ended, and those at the door that are not welcome.
void Server::reap() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &count, sizeof count);
  for (auto at = clients_.begin(); at != clients_.end();) {
    Client& client = at->second;
    const bool late = !client.session && Clock::now() >= client.greet_until;
    if (!(client.session ? client.session->ended() : client.gone || late)) {
      ++at;
      continue;
    }
    if (client.session) {
      const std::string& complaint = client.session->complaint();
      if (!complaint.empty()) {
        note("process " + std::to_string(client.peer.pid) + " was detached: " + complaint);
      }
      // A client that is still there may hold on to the file; it shall not hold memory of ours.
      if (!stopping_.load()) client.session->memory().free_pages();
    }
    take_out(at++);
  }
}

// What it leaves takes a while to unmap: without the lock.
void Server::take_out(std::map<int, Client>::iterator client) {
  std::map<int, Client>::node_type over;
  const std::lock_guard lock(mutex_);
  over = clients_.extract(client);
}

// The server ends, not the clients: what they were answered stays theirs to read.
void Server::end_all() {
  for (auto& [fd, client] : clients_) {
    if (client.session) client.session->stop();
  }
  while (!clients_.empty()) take_out(clients_.begin());
}

}  // namespace engram::shm
