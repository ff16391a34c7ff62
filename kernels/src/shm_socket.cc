#include "shm_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace engram::shm {
namespace {

using Clock = std::chrono::steady_clock;

// Between two tries at a socket whose line is full.
constexpr std::chrono::milliseconds kLineFull{10};
constexpr std::int64_t kPollMs = 1000;  // longer waits are made of these

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

bool has_group(int socket, gid_t wanted, gid_t first) {
  if (first == wanted) return true;
  std::vector<gid_t> groups(64);
  while (true) {
    auto bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) == 0) {
      groups.resize(bytes / sizeof(gid_t));
      return std::ranges::find(groups, wanted) != groups.end();
    }
    if (errno != ERANGE || bytes <= groups.size() * sizeof(gid_t)) return false;
    groups.resize(bytes / sizeof(gid_t));
  }
}

}  // namespace

Peer peer_of(int socket, std::optional<gid_t> group) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    fail(errno, "the credentials of a client could not be had");
  }
  return {.pid = credentials.pid,
          .uid = credentials.uid,
          .in_group = group && has_group(socket, *group, credentials.gid)};
}

bool receive_hello(int socket, Hello& hello) {
  // A packet longer than this is cut off, and then says so. Descriptors sent along are not taken.
  iovec part{.iov_base = &hello, .iov_len = sizeof hello};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const ssize_t got = ::recvmsg(socket, &message, MSG_DONTWAIT);
  return got == static_cast<ssize_t>(sizeof hello) && (message.msg_flags & MSG_TRUNC) == 0 &&
         hello.magic == kMagic;
}

bool send_welcome(int socket, const Welcome& welcome, int file) {
  iovec part{.iov_base = const_cast<Welcome*>(&welcome), .iov_len = sizeof welcome};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(rights), &file, sizeof file);
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof welcome);
}

UniqueFd connect_to(const std::string& path, const Hello& hello, Clock::time_point until) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) fail(ENAMETOOLONG, path);
  std::memcpy(address.sun_path, path.data(), path.size());
  // Never waits in connect(), which could take for ever where a server that hangs has a full line.
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) fail(errno, "no socket could be made");
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) !=
         0) {
    if (errno != EAGAIN && errno != EINTR) fail(errno, path);
    if (Clock::now() >= until) fail(ETIMEDOUT, path);
    std::this_thread::sleep_for(kLineFull);
  }
  if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) fail(errno, path);
  return socket;
}

Received receive_welcome(int socket, Clock::time_point until) {
  Received received;
  iovec part{.iov_base = &received.welcome, .iov_len = sizeof received.welcome};
  int file = -1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen =
      CMSG_LEN(sizeof file);  // one: with the padding there would be room for two
  ssize_t got = -1;
  while ((got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
    if (errno != EAGAIN && errno != EINTR) fail(errno, "the server's answer could not be read");
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0) fail(ETIMEDOUT, "the server did not answer");
    pollfd waiting{.fd = socket, .events = POLLIN, .revents = 0};
    ::poll(&waiting, 1, static_cast<int>(std::min<std::int64_t>(left.count(), kPollMs)));
  }
  const cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS &&
      rights->cmsg_len == CMSG_LEN(sizeof file)) {
    std::memcpy(&file, CMSG_DATA(rights), sizeof file);
    received.file.reset(file);
  }
  if (got == 0) fail(ECONNRESET, "the server hung up");
  if (got != static_cast<ssize_t>(sizeof received.welcome) || received.welcome.magic != kMagic) {
    throw std::runtime_error("what answers there is no shared-memory channel of engram-server");
  }
  return received;
}

bool connected(int socket) {
  char byte = 0;
  const ssize_t got = ::recv(socket, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

}  // namespace engram::shm
