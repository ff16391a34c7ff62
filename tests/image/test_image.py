"""The image as an operator starts it: hardened, behind seccomp profiles, shared with engines in other containers."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.containers import HARDENED, IMAGE, SECCOMP, USER, Container, podman
from support.truth import Truth, same

from engram_client import EngramClient

Start = Callable[..., Container]
IDS = [0, 17, -1, 4051, 17]
OURS = f"--security-opt=seccomp={SECCOMP}"


def exact(container: Container, checkpoint: Path) -> bool:
    """Whether rows come as the table has them, converted or not."""
    truth = Truth(checkpoint, "fp4")
    with EngramClient(container.target, shared_memory="off") as client:
        tokens = client.lookup([0, 3, 17, 29, 4051])
        rows = client.lookup_rows(layer=14, ids=IDS, format="packed").values
        expected = truth.values(truth.ids([0, 3, 17, 29, 4051]), "bf16")
        return same(tokens.values, expected) and same(rows, truth.rows(14, IDS, "packed"))


def test_a_hardened_container_serves_exact_rows_by_io_uring(start: Start, checkpoint: Path) -> None:
    container = start(*HARDENED, OURS)
    assert "backend io_uring (" in container.ready_line()
    assert exact(container, checkpoint)
    status = container.python("print(open('/proc/1/status').read())")
    assert f"Uid:\t{USER}\t{USER}\t{USER}\t{USER}\n" in status
    assert "CapBnd:\t0000000000000000\n" in status
    assert "Seccomp:\t2\n" in status
    with pytest.raises(AssertionError, match="Read-only file system"):
        container.python("open('/var/lib/engram/file', 'w')")


def test_health_and_metrics_are_on_by_default(start: Start) -> None:
    container = start(*HARDENED, OURS)
    container.ready_line()
    podman("healthcheck", "run", container.id)
    metrics = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
    assert "\nengram_ready 1.0\n" in container.python(metrics)


def test_a_container_whose_server_is_not_ready_is_unhealthy(start: Start) -> None:
    container = start(*HARDENED, OURS, serve=("--metrics=none",))
    container.ready_line()
    assert podman("healthcheck", "run", container.id, check=False).returncode == 1


def test_a_stopped_container_drains_and_ends_well(start: Start, sockets: Path) -> None:
    container = start(*HARDENED, OURS)
    container.ready_line()
    assert container.stop() == 0
    assert "draining" in container.log()
    assert list(sockets.iterdir()) == []


@pytest.mark.parametrize("profile", ["the engine's own", "ours without io_uring"])
def test_where_io_uring_is_refused_rows_are_exact_all_the_same(
    profile: str, start: Start, checkpoint: Path, tmp_path: Path
) -> None:
    option = []
    if profile != "the engine's own":
        document = json.loads(SECCOMP.read_text())
        document["syscalls"] = [
            entry for entry in document["syscalls"] if "io_uring_setup" not in entry["names"]
        ]
        (tmp_path / "profile.json").write_text(json.dumps(document))
        option = [f"--security-opt=seccomp={tmp_path / 'profile.json'}"]
    container = start(*HARDENED, *option)
    line = container.ready_line()
    assert "backend pread (io_uring" in line
    assert exact(container, checkpoint)


@pytest.mark.parametrize("backend", ["io_uring", "pread", "mmap"])
def test_every_backend_works_behind_the_profile(backend: str, checkpoint: Path) -> None:
    volume = f"--volume={checkpoint}:/model:ro"
    command = ["lookup", "/model", "--rows=14:0,17,-1,4051,17", "--json", f"--backend={backend}"]
    run = podman("run", "--rm", "--network=none", *HARDENED, OURS, volume, IMAGE, *command)
    expected = Truth(checkpoint, "fp4").rows(14, IDS, "packed")
    assert json.loads(run.stdout)["rows"] == expected.tolist()


def test_the_machine_is_examined_behind_the_profile(checkpoint: Path) -> None:
    volume = f"--volume={checkpoint}:/model:ro"
    run = podman(
        "run",
        "--rm",
        "--network=none",
        *HARDENED,
        OURS,
        volume,
        IMAGE,
        "doctor",
        "/model",
        "--json",
        check=False,
    )
    assert run.returncode in (0, 2), run.stderr
    assert "lets a ring be set up" in run.stdout


def test_a_hot_set_is_kept_in_the_one_writable_folder(start: Start, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, USER, USER)
    container = start(
        *HARDENED, OURS, f"--volume={state}:/var/lib/engram", serve=("--hot-set=/var/lib/engram/hot.set",)
    )
    container.ready_line()
    with EngramClient(container.target, shared_memory="off") as client:
        client.lookup([0, 3, 17])
    assert container.stop() == 0
    assert (state / "hot.set").stat().st_size > 0


_ENGINE = """
import hashlib, sys
from engram_client import EngramClient
with EngramClient(sys.argv[1], shared_memory="require") as client:
    rows = client.lookup_rows(layer=14, ids=[0, 17, -1, 4051, 17], format="packed").values
print(hashlib.sha256(rows.tobytes()).hexdigest())
"""


def engine(container: Container, target: str, *options: object) -> str:
    """A look-up through shared memory by a container beside the server's: a digest of rows, or what went wrong."""
    volume = f"--volume={container.sockets}:/run/engram"
    run = podman(
        *("run", "--rm", f"--network=container:{container.id}", volume, "--security-opt=no-new-privileges"),
        *(*options, "--entrypoint=python3", IMAGE, "-c", _ENGINE, target),
        check=False,
    )
    return run.stdout.strip() if run.returncode == 0 else run.stderr


def test_engines_in_other_containers_share_memory_as_far_as_they_may(start: Start, checkpoint: Path) -> None:
    container = start(*HARDENED, OURS, serve=(f"--shm-group={USER}",))
    container.ready_line()
    digest = hashlib.sha256(Truth(checkpoint, "fp4").rows(14, IDS, "packed").tobytes()).hexdigest()
    socket, tcp = "unix:/run/engram/engram.sock", "127.0.0.1:50051"
    assert engine(container, socket, f"--user={USER}:{USER}", "--cap-drop=ALL") == digest
    assert engine(container, socket, "--user=0:0") == digest, "root, as most engines' images"
    # gRPC's socket is for its owner; shared memory lets the group in, and is found over TCP.
    assert engine(container, tcp, "--user=4000:4000", f"--group-add={USER}") == digest
    assert "there is no shared memory: " in engine(container, tcp, "--user=4000:4000")
