"""A FUSE file system that mirrors a directory and breaks reads on demand: faults below the reader.

    with faulty_fs(source, mountpoint) as faults:
        faults.set("eio", begin, end)       # reads touching [begin, end) fail with EIO
        faults.set("short", begin, end, keep=512)  # they return so many bytes at most
        faults.set("slow", begin, end, delay_s=0.1)  # they take so long, one after another
        faults.set("hold", begin, end)      # they wait for the next change; needs `threads`, for all else to go on
        faults.clear()

Runs itself in a process of its own.
"""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Faults:
    """What the mounted file system does to reads; changes take effect with the next read."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self.clear()

    def set(
        self,
        kind: str,
        begin: int = 0,
        end: int = 1 << 62,
        keep: int = 0,
        refuse_direct: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        """kind: "eio", "short", "slow", "hold" or "none"; byte range of every file."""
        fault = {
            "kind": kind,
            "begin": begin,
            "end": end,
            "keep": keep,
            "refuse_direct": refuse_direct,
            "delay_s": delay_s,
        }
        temporary = self._control.with_suffix(".new")
        temporary.write_text(json.dumps(fault))
        temporary.rename(self._control)

    def clear(self) -> None:
        """Read faithfully."""
        self.set("none")


@contextmanager
def faulty_fs(
    source: Path, mountpoint: Path, control: Path, page_cache: bool = False, threads: bool = False
) -> Iterator[Faults]:
    """Mount `source` at `mountpoint` for the length of a with block.

    page_cache: let the kernel cache pages, which mmap needs; else every read comes here as it was asked.
    threads: answer up to ten calls of the kernel at once.
    """
    faults = Faults(control)
    mountpoint.mkdir(exist_ok=True)
    arguments = [str(path) for path in (source, mountpoint, control)]
    arguments += ["cached" if page_cache else "direct", "many" if threads else "one"]
    daemon = subprocess.Popen([sys.executable, __file__, *arguments])
    try:
        deadline = time.monotonic() + 120
        while not os.path.ismount(mountpoint):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the test file system did not mount: are fuse3 and /dev/fuse here?")
            time.sleep(0.01)
        yield faults
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=False)
        daemon.kill()  # readers that still hold files would keep it alive
        daemon.wait(timeout=20)


def _serve(source: str, mountpoint: str, control: str, mode: str, threads: str) -> None:
    import mfusepy

    max_read = 128 << 10  # left alone, the kernel would cut every read into pages

    class Mirror(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def init_with_config(self, connection: Any, config: Any) -> None:
            connection.max_read = max_read

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            try:
                info = os.lstat(source + path)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from error
            keys = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid")
            return {key: getattr(info, key) for key in keys}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *(entry.name for entry in Path(source + path).iterdir())]

        def open(self, path: str, flags: int) -> int:
            if flags & os.O_DIRECT and self._fault()["refuse_direct"]:
                raise mfusepy.FuseOSError(errno.EINVAL)
            return os.open(source + path, os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            fault = self._fault()
            if fault["kind"] != "none" and offset < fault["end"] and offset + size > fault["begin"]:
                if fault["kind"] == "eio":
                    raise mfusepy.FuseOSError(errno.EIO)
                if fault["kind"] == "short":
                    size = min(size, fault["keep"])
                time.sleep(fault["delay_s"])
                while fault["kind"] == "hold" and self._fault() == fault:
                    time.sleep(0.01)
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def _fault(self) -> dict[str, Any]:
            return json.loads(Path(control).read_text())

    options = {"ro": True, "nothreads": threads == "one", "attr_timeout": 0, "max_read": max_read}
    mfusepy.FUSE(Mirror(), mountpoint, foreground=True, direct_io=mode == "direct", **options)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
