"""What systemd hears from a server that it started."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import ServerProcess, serving

from engram_server.systemd import notify


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """The end where systemd would listen."""
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.settimeout(30)
        end.bind(name if request.param == "path" else f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", name if request.param == "path" else f"@{name}")
        yield end


def heard_until(end: socket.socket, last: bytes) -> list[bytes]:
    """All that comes until that has."""
    heard = [end.recv(4096)]
    while heard[-1] != last:
        heard.append(end.recv(4096))
    return heard


def test_it_hears_that_the_server_is_ready_lives_and_stops(
    manager: socket.socket, fp4_checkpoint: Path, tmp_path: Path
) -> None:
    with serving(fp4_checkpoint, tmp_path) as server:
        assert b"STOPPING=1" not in heard_until(manager, b"READY=1")
        heard_until(manager, b"WATCHDOG=1")
        heard_until(manager, b"WATCHDOG=1")
        assert server.stop() == 0
        heard_until(manager, b"STOPPING=1")


def test_a_manager_that_is_gone_stops_no_server(
    fp4_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "absent"))
    server: ServerProcess
    with serving(fp4_checkpoint, tmp_path) as server:
        assert "systemd could not be told READY=1: " in server.log.read_text()
        assert server.stop() == 0


def test_a_manager_that_does_not_listen_is_not_waited_for(
    manager: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10_000):
        notify("WATCHDOG=1")
    assert "systemd could not be told WATCHDOG=1: Resource temporarily unavailable" in str(
        caplog.messages[-1]
    )


def test_without_systemd_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    assert caplog.messages == []
