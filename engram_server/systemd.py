"""What systemd is told of this process, if that started it: sd_notify(3), for a unit of `Type=notify`."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger("engram_server")


def notify(state: str) -> None:
    """Say READY=1, WATCHDOG=1 or STOPPING=1. Never waits; a failure is only logged."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # of the abstract kind
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(state.encode(), address)
    except OSError as error:
        log.warning("systemd could not be told %s: %s", state, error.strerror or error)
