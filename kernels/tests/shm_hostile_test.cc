// Clients that keep no rule. Each runs beside one that does, which must be answered exactly all
// along; afterwards the server must be as it was before.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "shm_world.h"

namespace engram::test {
namespace {

// The memory of a client that does with it what it likes.
struct Raw {
  UniqueFd socket;
  shm::Memory memory;

  static Raw attach(const ShmWorld& world) {
    UniqueFd socket = shm::connect_to(world.path, {.data_bytes = 1 << 20}, soon());
    shm::Received received = shm::receive_welcome(socket.get(), soon());
    return {std::move(socket),
            shm::Memory::map(std::move(received.file), received.welcome.file_bytes)};
  }
  // The same memory once more, as another process of the client's would have it.
  shm::Memory map_again() {
    UniqueFd file = memory.take_fd();
    return shm::Memory::map(std::move(file), memory.file_bytes());
  }
  void put(std::uint32_t at, const shm::Entry& entry) const { memory.entry(at) = entry; }
  void submit(std::uint32_t entries) const {
    shm::Header& header = memory.header();
    shm::shared(header.submitted).fetch_add(entries);
    shm::shared(header.doorbell).fetch_add(1);
    ::syscall(SYS_futex, &header.doorbell, 1 /* FUTEX_WAKE */, 1, nullptr, nullptr, 0);
  }
  bool shown_out() const { return !shm::connected(socket.get()); }
};

// Runs `mischief` beside a client whose every answer is compared.
void beside_an_honest_client(ShmWorld& world, const std::function<void()>& mischief) {
  const auto honest = world.attach();
  std::atomic<bool> over{false};
  std::atomic<int> wrong{0};
  std::atomic<int> right{0};
  std::thread asker([&] {
    Random random(77);
    while (!over.load() || right.load() == 0) {
      const bool fine = complaint(*honest, draw_rows(random, kTwoCopies, 30)).empty();
      ++(fine ? right : wrong);
    }
  });
  mischief();
  over.store(true);
  asker.join();
  CHECK(wrong.load() == 0);
  CHECK(until([&] { return world.server->counts().clients == 1; }));
  CHECK(until([&] { return world.engine->in_flight_bytes() == 0; }));
}

shm::Entry rows_entry(std::uint32_t slot, std::uint32_t serial) {
  return {.kind = shm::Kind::rows,
          .slot = slot,
          .serial = serial,
          .positions = 10,
          .keys_offset = 0,
          .keys_bytes = 84,
          .out_offset = 4096,
          .out_bytes = 1360,
          .layers = 1,
          .id_bytes = 8};
}

TEST_CASE("random bytes in the ring, the keys and the words") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    Random random(1);
    for (int round = 0; round < 60; ++round) {
      const Raw raw = Raw::attach(world);
      for (int burst = 0; burst < 10 && !raw.shown_out(); ++burst) {
        for (std::uint32_t at = 0; at < 32; ++at) {
          const auto bytes = random_bytes(random, sizeof(shm::Entry));
          std::memcpy(&raw.memory.entry(at), bytes.data(), bytes.size());
          if (draw(random, 0, 3) != 0) raw.memory.entry(at).slot %= shm::kSlots;
          if (draw(random, 0, 1) != 0) raw.memory.entry(at).kind = shm::Kind::rows;
        }
        const auto junk = random_bytes(random, 4096);
        std::memcpy(raw.memory.data().data(), junk.data(), junk.size());
        raw.submit(draw<std::uint32_t>(random, 0, 40));
        shm::shared(raw.memory.header().doorbell).store(static_cast<std::uint32_t>(random()));
      }
    }
  });
}

TEST_CASE("a ring that claims more than it has, and slots that are not there or not free") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    const Raw greedy = Raw::attach(world);
    greedy.submit(shm::kRingEntries + 1);
    CHECK(until([&] { return greedy.shown_out(); }));

    const Raw beyond = Raw::attach(world);
    beyond.put(0, rows_entry(shm::kSlots, 1));
    beyond.submit(1);
    CHECK(until([&] { return beyond.shown_out(); }));

    const Raw twice = Raw::attach(world);
    twice.put(0, rows_entry(3, 1));
    twice.put(1, rows_entry(3, 2));
    twice.submit(2);
    CHECK(until([&] { return twice.shown_out(); }));
  });
  CHECK(world.server->take_notes().size() == 3);
}

TEST_CASE("lengths and offsets beyond the data area, and sums that wrap") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    const Raw raw = Raw::attach(world);
    const std::uint64_t area = raw.memory.data().size();
    const std::array<std::uint64_t, 6> bad{area, area - 8, area + 1, 1ull << 63, ~0ull, ~0ull - 83};
    std::uint32_t serial = 0;
    const auto refused = [&](const shm::Entry& entry) {
      raw.put(serial, entry);
      raw.submit(1);
      const shm::Completion& answer = raw.memory.completion(entry.slot);
      const bool answered = until([&] {
        return shm::shared(const_cast<std::uint32_t&>(answer.serial)).load() == entry.serial;
      });
      ++serial;
      return answered && answer.status == shm::Status::invalid_argument;
    };
    for (const std::uint64_t value : bad) {
      shm::Entry entry = rows_entry(serial % shm::kSlots, serial + 1);
      entry.keys_offset = value;
      CHECK(refused(entry));
      entry = rows_entry(serial % shm::kSlots, serial + 1);
      entry.keys_bytes = value;
      CHECK(refused(entry));
      entry = rows_entry(serial % shm::kSlots, serial + 1);
      entry.out_offset = value;
      CHECK(refused(entry));
      entry = rows_entry(serial % shm::kSlots, serial + 1);
      entry.positions = static_cast<std::uint32_t>(value);
      CHECK(refused(entry));
    }
  });
}

TEST_CASE("fields that change while they are read") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    Raw raw = Raw::attach(world);
    const shm::Memory scribbled = raw.map_again();
    std::atomic<bool> stop{false};
    std::thread scribbler([&] {
      Random random(3);
      auto* const ids = reinterpret_cast<std::int64_t*>(scribbled.data().data());
      while (!stop.load()) {
        ids[random() % 10] =
            static_cast<std::int64_t>(random() % 2 == 0 ? random() : random() % 3000);
        shm::Entry& entry = scribbled.entry(static_cast<std::uint32_t>(random()));
        entry.out_offset = random() % 3 == 0 ? random() : 4096;
        entry.keys_bytes = random() % 3 == 0 ? random() % 200 : 84;
        entry.positions = random() % 3 == 0 ? static_cast<std::uint32_t>(random()) : 10;
        entry.format = static_cast<std::uint8_t>(random() % 6);
      }
    });
    // Whatever was read, each request is answered, in words or with rows.
    for (std::uint32_t serial = 1; serial <= 100; ++serial) {
      for (std::uint32_t slot = 0; slot < shm::kSlots; ++slot) {
        raw.put(serial * shm::kSlots + slot - shm::kSlots, rows_entry(slot, serial));
        raw.submit(1);
      }
      for (std::uint32_t slot = 0; slot < shm::kSlots; ++slot) {
        shm::Completion& answer = raw.memory.completion(slot);
        CHECK(until([&] { return shm::shared(answer.serial).load() == serial; }));
        CHECK((answer.status == shm::Status::ok || answer.status == shm::Status::invalid_argument));
      }
    }
    CHECK_FALSE(raw.shown_out());
    stop.store(true);
    scribbler.join();
  });
}

TEST_CASE("a client that never looks at its answers, with all its slots full") {
  ShmWorld world(false, {}, 4 << 20);
  beside_an_honest_client(world, [&] {
    const auto hoarder = world.attach(64 << 20);
    Random random(4);
    const RowsAsked asked = draw_rows(random, kTwoCopies, 5'000);
    std::vector<std::shared_ptr<shm::Ticket>> tickets;
    for (std::uint32_t i = 0; i < shm::kSlots; ++i) {
      tickets.push_back(hoarder->submit(asked.call(), soon()));
    }
    CHECK(hoarder->submit(asked.call(), Clock::now()) == nullptr);
    CHECK(until([&] { return world.server->counts().requests >= shm::kSlots; }));
  });
}

TEST_CASE("a client that gives up what it asks for at once has no more than its share") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    const auto hasty = world.attach(8 << 20);
    Random random(5);
    const RowsAsked asked = draw_rows(random, kTwoCopies, 20'000);
    std::uint64_t most = 0;
    for (int round = 0; round < 300; ++round) {
      const auto ticket = hasty->submit(asked.call(), soon());
      while (world.engine->in_flight_bytes() == 0 && !ticket->wait(Clock::now(), {})) continue;
      ticket->release();
      most = std::max(most, world.engine->in_flight_bytes());
    }
    // The honest one's few rows beside it.
    CHECK(most < world.engine->budget_bytes() / 8 + (1 << 20));
  });
}

TEST_CASE("who may attach: one's own user, root, and the group that was named") {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0);
  const UniqueFd here(ends[0]);
  const UniqueFd there(ends[1]);
  std::vector<gid_t> groups(static_cast<std::size_t>(::getgroups(0, nullptr)));
  ::getgroups(static_cast<int>(groups.size()), groups.data());
  groups.push_back(::getegid());
  const gid_t foreign = *std::ranges::max_element(groups) + 1;
  for (const gid_t group : groups) CHECK(shm::peer_of(here.get(), group).in_group);
  CHECK_FALSE(shm::peer_of(here.get(), foreign).in_group);
  const shm::Peer peer = shm::peer_of(here.get(), std::nullopt);
  CHECK(peer.pid == ::getpid());
  CHECK(peer.uid == ::geteuid());
  CHECK_FALSE(peer.in_group);

  CHECK(shm::Peer{.uid = 1000}.may_attach(1000));
  CHECK(shm::Peer{.uid = 0}.may_attach(1000));
  CHECK(shm::Peer{.uid = 1001, .in_group = true}.may_attach(1000));
  CHECK_FALSE(shm::Peer{.uid = 1001}.may_attach(1000));
  CHECK_FALSE(shm::Peer{.uid = 1000}.may_attach(0));
}

TEST_CASE("greetings that are none, and none at all") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    for (const std::size_t bytes : {1u, 23u, 24u, 25u, 4096u}) {
      const UniqueFd socket = shm::connect_to(world.path, {.magic = {'n', 'o'}}, soon());
      const std::vector<char> junk(bytes, 'x');
      ::send(socket.get(), junk.data(), junk.size(), MSG_NOSIGNAL);
      CHECK(until([&] { return !shm::connected(socket.get()); }));
    }
    const UniqueFd newer = shm::connect_to(world.path, {.version = 9}, soon());
    const shm::Received answer = shm::receive_welcome(newer.get(), soon());
    CHECK(answer.welcome.status == shm::Status::failed_precondition);
    CHECK_FALSE(answer.file);
    // Talking while attached is the end of it.
    const Raw talker = Raw::attach(world);
    ::send(talker.socket.get(), "hello?", 6, MSG_NOSIGNAL);
    CHECK(until([&] { return talker.shown_out(); }));
  });
}

TEST_CASE("who says nothing at the door keeps nobody out") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    std::vector<UniqueFd> silent(100);
    for (UniqueFd& socket : silent) {
      socket = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
      sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
      std::strncpy(address.sun_path, world.path.c_str(), sizeof address.sun_path - 1);
      REQUIRE(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address),
                        sizeof address) == 0);
    }
    CHECK(complaint(*world.attach(), {.layer = 1, .ids = {7}}) == "");
    CHECK(std::ranges::any_of(silent, [](const UniqueFd& s) { return shm::connected(s.get()); }));
  });
}

TEST_CASE("pages that a client takes out of the file come back, as zeros") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    Raw raw = Raw::attach(world);
    const UniqueFd file = raw.memory.take_fd();
    for (std::uint32_t round = 0; round < 300 && !raw.shown_out(); ++round) {
      for (std::uint32_t i = 0; i < 8; ++i) {
        raw.put(round * 8 + i, rows_entry((round * 8 + i) % shm::kSlots, round * 8 + i + 1));
      }
      raw.submit(8);
      CHECK(::fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                        static_cast<off_t>(raw.memory.file_bytes())) == 0);
    }
  });
}

TEST_CASE("a thread that sleeps on another word than it meant to is stopped all the same") {
  ShmWorld world(false);
  beside_an_honest_client(world, [&] {
    Raw raw = Raw::attach(world);
    std::uint32_t& doorbell = raw.memory.header().doorbell;
    std::uint32_t& elsewhere = raw.memory.header().server_waits;
    CHECK(until(
        [&] { return ::syscall(SYS_futex, &doorbell, FUTEX_REQUEUE, 0, 1, &elsewhere, 0) == 1; }));
    raw.socket.reset();
  });
}

TEST_CASE("a client that keeps the file after it was shown out holds no memory of the server's") {
  ShmWorld world(false);
  Raw raw = Raw::attach(world);
  std::memset(raw.memory.data().data(), 7, 1 << 20);
  raw.socket.reset();
  CHECK(until([&] { return world.server->counts().clients == 0; }));
  CHECK(raw.memory.data()[1000] == std::byte{0});
}

}  // namespace
}  // namespace engram::test
