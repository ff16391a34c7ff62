// The UNIX socket of the channel: who is there, a greeting, and the memory file handed over. While
// a client is attached the connection carries nothing; its end is the end of the other side.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>

#include "shm_layout.h"
#include "unique_fd.h"

namespace engram::shm {

// Who connected, as the kernel knows it.
struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
  bool in_group = false;  // of the group asked for, first or supplementary

  bool may_attach(uid_t own) const { return uid == own || uid == 0 || in_group; }
};

// Throws std::system_error.
Peer peer_of(int socket, std::optional<gid_t> group);

// Of a client that connected; false: it sent something else, or hung up. Never waits.
bool receive_hello(int socket, Hello& hello);
// False when the client is gone. Never waits. `file` < 0: none.
bool send_welcome(int socket, const Welcome& welcome, int file);

struct Received {
  Welcome welcome;
  UniqueFd file;
};

// The client's part: connects and sends the hello. Throws std::system_error, ETIMEDOUT among them.
UniqueFd connect_to(const std::string& path, const Hello& hello,
                    std::chrono::steady_clock::time_point until);
// Throws as connect_to(), and std::runtime_error for what is no welcome.
Received receive_welcome(int socket, std::chrono::steady_clock::time_point until);
// Whether the other side still has its end open.
bool connected(int socket);

}  // namespace engram::shm
