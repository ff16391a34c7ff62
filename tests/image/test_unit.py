"""The systemd unit as an operator installs it, under a real systemd."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.containers import podman
from support.truth import Truth

LOOKUP = "/opt/engram/bin/engram-server lookup unix:/run/engram/engram.sock --rows=14:0,17,-1,4051 --json"


class Machine:
    """A container that systemd runs in."""

    def __init__(self, *options: object) -> None:
        start = ("run", "--detach", "--privileged", "--systemd=always", "--network=none", "--no-healthcheck")
        self.id = podman(*start, *options, "engram-server:systemd").stdout.strip()

    def run(self, command: str) -> str:
        """What a shell of root prints; it must end well."""
        return podman("exec", self.id, "sh", "-ec", command).stdout


@pytest.fixture
def machine(checkpoint: Path) -> Iterator[Machine]:
    machine = Machine(
        f"--volume={checkpoint}:/models/DeepSeek-V4.1-Flash:ro",
        "--env=ENGRAM_SERVE_CACHE_BYTES=64MiB",
    )
    # systemd hands its own environment on only when told to, and takes a moment to answer at all.
    machine.run(
        "until systemctl is-system-running --wait; do sleep 0.2; done; "
        "mkdir -p /etc/systemd/system/engram-server.service.d; "
        "printf '[Service]\\nPassEnvironment=ENGRAM_SERVE_CACHE_BYTES\\n' "
        ">/etc/systemd/system/engram-server.service.d/test.conf; systemctl daemon-reload"
    )
    yield machine
    podman("rm", "--force", "--volumes", machine.id)


def test_the_unit_serves_exact_rows_confined_and_ends_well(machine: Machine, checkpoint: Path) -> None:
    machine.run("systemctl start engram-server")  # which returns when the server has said that it is ready
    found = json.loads(machine.run(f"su -s /bin/sh engram -c '{LOOKUP}'"))
    assert found["rows"] == Truth(checkpoint, "fp4").rows(14, [0, 17, -1, 4051], "packed").tolist()
    log = machine.run("journalctl --unit=engram-server")
    assert "backend io_uring (" in log
    assert "shared memory at /run/engram/engram.sock.shm" in log
    pid = machine.run("systemctl show --property=MainPID --value engram-server").strip()
    status = machine.run(f"cat /proc/{pid}/status")
    assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
    assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)
    machine.run("systemctl stop engram-server")
    ended = machine.run("systemctl show --property=Result,ExecMainStatus,NRestarts engram-server")
    assert sorted(ended.split()) == ["ExecMainStatus=0", "NRestarts=0", "Result=success"]
    assert machine.run("test -s /var/lib/engram-server/hot.set; ls -A /run/engram") == ""


def test_a_server_that_cannot_start_fails_the_unit(machine: Machine) -> None:
    machine.run("sed -i s,/models/DeepSeek-V4.1-Flash,/absent, /etc/engram/engram-server.toml")
    with pytest.raises(AssertionError):
        machine.run("systemctl start engram-server")
    assert "there is no such file" in machine.run("journalctl --unit=engram-server")
