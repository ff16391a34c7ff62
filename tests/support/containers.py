"""Containers of the image that scripts/test_image.sh built."""

import json
import re
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECCOMP = ROOT / "deploy/seccomp/engram-server.json"
IMAGE = "engram-server:test"
USER = 10001
HARDENED = (
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
)
"""As in the Dockerfile's header, but for what only makes it faster."""
_START_S = 60.0


def podman(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Its output; it must have succeeded."""
    command = [ROOT / "scripts/podman.sh", "--log-level=fatal", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0 or not check, result.stdout + result.stderr
    return result


class Container:
    """A server in a container without a network, and its folder of sockets."""

    def __init__(self, sockets: Path, *options: object, serve: tuple[str, ...] = ()) -> None:
        self.sockets = sockets
        command = ["serve", "--cache-bytes=64MiB", *serve]
        volume = f"--volume={sockets}:/run/engram"
        self.id = podman(
            "run", "--detach", "--network=none", volume, *options, IMAGE, *command
        ).stdout.strip()

    @property
    def target(self) -> str:
        """The UNIX socket, seen from here."""
        return f"unix:{self.sockets / 'engram.sock'}"

    def ready_line(self) -> str:
        """Wait for it."""
        give_up = time.monotonic() + _START_S
        while time.monotonic() < give_up:
            if found := re.search(r"^engram-server \S+ serves .*", self.log(), re.MULTILINE):
                return found[0]
            time.sleep(0.2)
        raise AssertionError(f"the server did not start: {self.log()}")

    def log(self) -> str:
        """Both streams."""
        result = podman("logs", self.id)
        return result.stdout + result.stderr

    def python(self, code: str) -> str:
        """What it prints in this container."""
        return podman("exec", self.id, "python3", "-c", code).stdout

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        podman("stop", "--time=60", self.id)
        return int(json.loads(podman("inspect", self.id).stdout)[0]["State"]["ExitCode"])

    def remove(self) -> None:
        """With all that it left."""
        podman("rm", "--force", "--volumes", self.id)
