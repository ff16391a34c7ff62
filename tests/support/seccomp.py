"""Forbid io_uring, or new threads, to this process with a seccomp filter, as container runtimes do."""

import ctypes
import os
import platform
import struct

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_TSYNC = 1
_SECCOMP_SYSCALL = {"x86_64": 317, "aarch64": 277}
_SETUP, _ENTER, _REGISTER = 425, 426, 427
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_LD_NR, _JEQ, _RET = 0x20, 0x15, 0x06
_ALLOW, _EPERM = 0x7FFF0000, 0x00050000 | 1


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def forbid_io_uring(calls: tuple[int, ...] = (_SETUP, _ENTER, _REGISTER)) -> None:
    """Make io_uring's system calls fail with EPERM in every thread, running ones included. No way back."""
    _forbid(calls)


def forbid_threads() -> None:
    """Make the start of a thread or child process fail with EPERM. No way back."""
    _forbid((_CLONE[platform.machine()], _CLONE3))


def _forbid(calls: tuple[int, ...]) -> None:
    lines = [(_LD_NR, 0, 0, 0)]
    lines += [(_JEQ, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    lines += [(_RET, 0, 0, _ALLOW), (_RET, 0, 0, _EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = _Program(len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    result = libc.syscall(
        _SECCOMP_SYSCALL[platform.machine()],
        _SECCOMP_SET_MODE_FILTER,
        _SECCOMP_FILTER_FLAG_TSYNC,
        ctypes.byref(program),
    )
    if result != 0:
        raise OSError(ctypes.get_errno(), f"seccomp ({os.strerror(ctypes.get_errno())})")
