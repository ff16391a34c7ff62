"""UNIX sockets to listen at: their paths, and those that dead servers left behind."""

from __future__ import annotations

import grp
import logging
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from engram_server.tables.opened import has_text_name

log = logging.getLogger("engram_server")

_PATH_BYTES_MAX = 107
"""sun_path of sockaddr_un, without its closing zero."""
_GROUP_END = 2**32 - 1
"""Of group ids; chown takes this one for no group."""


class ServeError(Exception):
    """The server cannot start; the text is a sentence for the operator."""


def remove(path: Path, inode: int) -> None:
    """Remove a socket of one's own, unless somebody has put another one in its place."""
    with suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def make_way(path: Path, kind: socket.SocketKind) -> None:
    """Remove the socket of this kind that a dead server left behind.

    Raises ServeError when a live one, or another file, is there, or when no socket can have this path.
    """
    if not has_text_name(path):
        raise ServeError(f"the path of the UNIX socket is not UTF-8: {path}")
    if len(bytes(path)) > _PATH_BYTES_MAX:
        raise ServeError(
            f"the path of the UNIX socket has {len(bytes(path))} bytes, over the {_PATH_BYTES_MAX} that "
            f"the system allows: {path}"
        )
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if path.parent.is_dir():
            return
        raise ServeError(f"there is no directory {path.parent} for the UNIX socket {path.name}") from None
    except OSError as error:
        raise ServeError(f"cannot listen on the UNIX socket {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ServeError(f"{path} exists and is not a socket: choose another path for the UNIX socket")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            log.info("removing %s, left behind by a server that is gone", path)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ServeError(f"cannot tell whether {path} is in use: {error}") from error
        else:
            raise ServeError(f"another server is listening on {path}: stop it, or choose another path")


def group_id(group: str) -> int:
    """The id of a group by its name or number. Raises ServeError."""
    if group.isdecimal() and int(group) < _GROUP_END:
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        raise ServeError(f"there is no group {group!r} to let in: give its name or number") from None


def open_to_group(path: Path, group: str) -> None:
    """Let members of a group connect to a socket of one's own, and nobody else. Raises ServeError."""
    number = group_id(group)
    try:
        os.chown(path, -1, number)
        path.chmod(0o660)
    except OSError as error:
        raise ServeError(
            f"cannot give the UNIX socket {path} to the group {group}: {error.strerror}"
        ) from error
