"""Where servers are: "host:port", "[::1]:port" or "unix:/path"."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

DEFAULT_TARGET = "127.0.0.1:50051"

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


def parse_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Check one target, or several in the order they are to be tried. Raises ValueError."""
    found = tuple(_parse(target) for target in ([targets] if isinstance(targets, str) else targets))
    if not found:
        raise ValueError(
            "no target given; expected at least one, such as 127.0.0.1:50051 or unix:/run/engram.sock"
        )
    return found


def is_local(target: str) -> bool:
    """Whether a target is on this host for certain: a UNIX socket or a loopback address."""
    host = target.rpartition(":")[0].strip("[]")
    if target.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, "127.0.0.1.example" among them
        return False


def _parse(target: str) -> str:
    if target.startswith("unix:"):
        path = target.removeprefix("unix:")
        if path.startswith("//"):  # unix:///absolute/path, the other spelling
            path = path.removeprefix("//")
        if path:
            return f"unix:{path}"
    elif (match := _HOST_PORT.fullmatch(target)) and 0 < int(match["port"]) < 65_536:
        return target
    raise ValueError(
        f"{target!r} is not a target: expected HOST:PORT (IPv6 in brackets, as in [::1]:50051) or unix:PATH"
    )
