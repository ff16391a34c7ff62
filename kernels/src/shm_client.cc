#include "shm_client.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "futex.h"

namespace engram::shm {
namespace {

using Clock = std::chrono::steady_clock;

// Between two looks whether the server is still there, while its answer is waited for.
constexpr std::chrono::milliseconds kLook{50};
// Between two looks for answers to requests that were given up, while there is no room.
constexpr std::chrono::milliseconds kReap{5};
constexpr std::size_t kKeysAlign = 8;

}  // namespace

std::shared_ptr<Client> Client::attach(const std::string& path, std::uint64_t data_bytes,
                                       std::chrono::milliseconds at_most) {
  const Clock::time_point until = Clock::now() + at_most;
  UniqueFd socket = connect_to(path, {.data_bytes = data_bytes}, until);
  Received received = receive_welcome(socket.get(), until);
  const Welcome& welcome = received.welcome;
  if (welcome.status != Status::ok) {
    const std::size_t length = std::min<std::size_t>(welcome.message_bytes, welcome.message.size());
    throw NotWelcome(welcome.status, {welcome.message.data(), length});
  }
  if (welcome.version != kVersion || !received.file) {
    throw std::runtime_error("the server at " + path + " handed no memory over that version " +
                             std::to_string(kVersion) + " of the channel knows");
  }
  Memory memory = Memory::map(std::move(received.file), welcome.file_bytes);
  memory.take_fd();
  return std::shared_ptr<Client>(
      new Client(std::move(socket), std::move(memory), welcome.server_id));
}

Client::Client(UniqueFd socket, Memory memory, const ServerId& id)
    : socket_(std::move(socket)),
      memory_(std::move(memory)),
      server_id_(id),
      pid_(::getpid()),
      extents_(memory_.data().size()) {
  for (std::uint32_t slot = kSlots; slot > 0; --slot) free_slots_.push_back(slot - 1);
}

Client::~Client() {
  // A child that was forked meanwhile has the socket, too, and would keep the server waiting.
  if (::getpid() == pid_) ::shutdown(socket_.get(), SHUT_RDWR);
}

std::shared_ptr<Ticket> Client::submit(const Call& call, Clock::time_point until) {
  if (::getpid() != pid_) throw Lost("the client was attached before a fork: attach again");
  std::uint64_t keys_bytes = 0;
  for (const auto& part : call.keys) keys_bytes += part.size();
  const std::uint64_t out_bytes = call.payload_bytes + call.mask_bytes;
  const std::uint64_t keys_at = (out_bytes + kKeysAlign - 1) / kKeysAlign * kKeysAlign;
  const std::uint64_t bytes = keys_at + keys_bytes;
  if (Extents::rounded(bytes) > memory_.data().size()) {
    throw std::invalid_argument("a request and its answer have " + std::to_string(bytes) +
                                " bytes; the data area has " +
                                std::to_string(memory_.data().size()));
  }
  std::uint32_t slot = 0;
  std::uint64_t offset = 0;
  Entry entry = call.entry;
  {
    std::unique_lock lock(mutex_);
    while (true) {
      if (!alive()) throw Lost("the server has ended the connection");
      reap();
      if (!free_slots_.empty()) {
        if (const auto found = extents_.take(bytes)) {
          offset = *found;
          break;
        }
      }
      const Clock::time_point now = Clock::now();
      if (now >= until) return nullptr;
      room_.wait_until(lock, std::min(until, now + (abandoned_.empty() ? kLook : kReap)));
    }
    slot = free_slots_.back();
    free_slots_.pop_back();
    if (++serial_ == 0) ++serial_;  // as in a slot that was never used
    entry.serial = serial_;
  }
  entry.slot = slot;
  entry.out_offset = offset;
  entry.out_bytes = out_bytes;
  entry.keys_offset = offset + keys_at;
  entry.keys_bytes = keys_bytes;
  std::byte* out = memory_.data().data() + entry.keys_offset;
  for (const auto& part : call.keys) out = std::copy(part.begin(), part.end(), out);
  auto ticket =
      std::make_shared<Ticket>(shared_from_this(), slot, entry.serial, offset, bytes, call);
  const std::lock_guard lock(mutex_);
  publish(entry);
  return ticket;
}

// With the lock held.
void Client::publish(const Entry& entry) {
  memory_.entry(submitted_) = entry;
  Header& header = memory_.header();
  shared(header.submitted).store(++submitted_);
  shared(header.doorbell).fetch_add(1);
  if (shared(header.server_waits).load() != 0) futex_wake(header.doorbell);
}

bool Client::answered(std::uint32_t slot, std::uint32_t serial) const {
  return shared(memory_.completion(slot).serial).load() == serial;
}

void Client::leave(const Ticket& ticket) {
  if (::getpid() != pid_) return;
  const Abandoned part{ticket.slot_, ticket.serial_, ticket.offset_, ticket.bytes_};
  const std::lock_guard lock(mutex_);
  if (answered(part.slot, part.serial)) return give_back(part);
  abandoned_.push_back(part);
  publish({.kind = Kind::cancel, .slot = part.slot, .serial = part.serial});
}

// With the lock held.
void Client::give_back(const Abandoned& part) {
  extents_.give(part.offset, part.bytes);
  free_slots_.push_back(part.slot);
  room_.notify_all();
}

// With the lock held.
void Client::reap() {
  std::erase_if(abandoned_, [&](const Abandoned& part) {
    if (!answered(part.slot, part.serial)) return false;
    give_back(part);
    return true;
  });
}

void Client::close() { closed_.store(true); }

// -------------------------------------------------------------------------------------- tickets

Ticket::Ticket(std::shared_ptr<Client> client, std::uint32_t slot, std::uint32_t serial,
               std::uint64_t offset, std::uint64_t bytes, const Call& call)
    : slot_(slot),
      serial_(serial),
      offset_(offset),
      bytes_(bytes),
      payload_bytes_(call.payload_bytes),
      mask_bytes_(call.mask_bytes),
      client_(std::move(client)) {}

Ticket::~Ticket() { release(); }

std::shared_ptr<Client> Ticket::client() const {
  const std::lock_guard lock(mutex_);
  if (client_ == nullptr) throw std::logic_error("the request was released");
  return client_;
}

bool Ticket::wait(Clock::time_point until, std::chrono::nanoseconds spin) {
  const std::shared_ptr<Client> client = this->client();
  const auto answered = [&] { return client->answered(slot_, serial_); };
  Completion& from = client->memory_.completion(slot_);
  if (spin.count() > 0) {
    const Clock::time_point spin_until = std::min(until, Clock::now() + spin);
    while (!answered() && Clock::now() < spin_until) spin_hint();
  }
  shared(from.client_waits).store(1);
  while (!answered()) {
    const std::uint32_t before = shared(from.serial).load();
    const Clock::time_point now = Clock::now();
    if (before == serial_ || now >= until) break;
    futex_wait(from.serial, before, std::min<std::chrono::nanoseconds>(until - now, kLook));
    if (!answered() && !client->alive() && !answered()) {
      throw Lost("the server ended before it answered");
    }
  }
  shared(from.client_waits).store(0);
  if (!answered()) return false;
  const std::lock_guard lock(mutex_);
  // While it is not released, nobody else's answer comes to the slot.
  if (client_ == nullptr) throw std::logic_error("the request was released");
  if (done_) return true;
  copy_once(&answer_, &from, sizeof answer_);
  answer_.message_bytes = std::min<std::uint32_t>(
      answer_.message_bytes, static_cast<std::uint32_t>(answer_.message.size()));
  return done_ = true;
}

std::span<std::byte> Ticket::rows() const {
  return client()->data().subspan(offset_, payload_bytes_);
}

std::span<std::byte> Ticket::mask() const {
  return client()->data().subspan(offset_ + payload_bytes_, mask_bytes_);
}

void Ticket::release() {
  std::shared_ptr<Client> client;
  {
    const std::lock_guard lock(mutex_);
    client = std::move(client_);
  }
  if (client != nullptr) client->leave(*this);
}

}  // namespace engram::shm
