"""Reading and writing safetensors headers: bounded, checked, and never touching tensor data.

A file is u64 header length (little-endian), that many bytes of JSON, then the data. The JSON maps a tensor's
name to its dtype, shape and [begin, end) offsets, counted from the end of the header.

The safetensors package cannot stand in for this: its NumPy side knows neither F8_E8M0 nor F8_E4M3, and
it calls a Git LFS pointer "header too large". We are as strict as it is about everything that could make a
row wrong, and laxer in one point: bytes that no tensor owns, between tensors or at the end, are let be.
Hand-built containers may align their data, and every range we read is still named by exactly one tensor.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engram_server.tables.errors import TableError

HEADER_BYTES_MAX = 100_000_000
"""As the safetensors library limits it."""
TENSORS_MAX = 1_000_000
RANK_MAX = 64

_LENGTH_BYTES = 8
_LFS_MAGIC = b"version https://git-lfs"
_INT64_MAX = 2**63 - 1

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype of safetensors 0.8."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file. Any value: nothing promises alignment."""
    end: int
    """One past the last byte."""


@dataclass(frozen=True)
class Header:
    """What a safetensors file says it holds."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_begin: int
    file_bytes: int

    @property
    def unowned_bytes(self) -> int:
        """Data bytes that belong to no tensor: holes between tensors and bytes after the last."""
        owned = sum(tensor.end - tensor.begin for tensor in self.tensors.values())
        return self.file_bytes - self.data_begin - owned


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file, in time proportional to the header.

    Raises TableError, a sentence that names the file, what is wrong and what to do.
    """
    raw, file_bytes = _read_raw(path)
    entries = parse_json_object(path, "the safetensors header", raw)
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    if len(entries) > TENSORS_MAX:
        _refuse(path, f"the header lists {len(entries)} tensors; the limit is {TENSORS_MAX}")
    data_begin = _LENGTH_BYTES + len(raw)
    tensors = {name: _tensor(path, name, entry, data_begin, file_bytes) for name, entry in entries.items()}
    _check_overlap(path, tensors)
    return Header(path, tensors, metadata, data_begin, file_bytes)


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], residue: int = 0
) -> tuple[bytes, list[TensorInfo]]:
    """The head of a file that holds `tensors` (name, dtype, shape) back to back, and where each will lie.

    The data begins at an offset of this residue modulo 8 (0 is what the safetensors library writes), reached
    by spaces after the JSON, which the format allows.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    ranges, end = [], 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        ranges.append(TensorInfo(name, dtype, shape, begin, end))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * ((residue - len(text)) % 8)
    data = _LENGTH_BYTES + len(text)
    located = [TensorInfo(t.name, t.dtype, t.shape, t.begin + data, t.end + data) for t in ranges]
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, located


def parse_json_object(path: Path, what: str, raw: bytes) -> dict[str, Any]:
    """A JSON object in which no key occurs twice, at any depth. Raises TableError."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        _refuse(path, f"{what} is not UTF-8 ({error.reason} at byte {error.start})")
    except RecursionError:
        _refuse(path, f"{what} is not JSON we accept: it is nested too deeply")
    except _DuplicateKeyError as error:
        _refuse(path, f"{what} has the key {error.args[0]!r} twice")
    except ValueError as error:
        _refuse(path, f"{what} is not JSON: {error}")
    if not isinstance(value, dict):
        _refuse(path, f"{what} is JSON, but not an object")
    return value


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _DuplicateKeyError(counts.most_common(1)[0][0])
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _refuse(path: Path, problem: str, advice: str = "download or convert the file again") -> NoReturn:
    raise TableError(f"{path}: {problem}; {advice}")


def _read_raw(path: Path) -> tuple[bytes, int]:
    """The header's JSON bytes and the file's size."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before open, which would wait on a pipe for its writer
            _refuse(path, "this is not a regular file", "name a safetensors file")
        with path.open("rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            head = file.read(len(_LFS_MAGIC))
            if head == _LFS_MAGIC:
                _refuse(
                    path, "this is a Git LFS pointer, not the file", "run `git lfs pull` in the checkpoint"
                )
            if not head:
                _refuse(path, "the file is empty")
            if len(head) < _LENGTH_BYTES:
                _refuse(path, f"the file has {len(head)} bytes; a safetensors file has at least 8")
            length = int.from_bytes(head[:_LENGTH_BYTES], "little")
            if length > HEADER_BYTES_MAX:
                _refuse(
                    path,
                    f"the first 8 bytes say the header has {length} bytes; the limit is {HEADER_BYTES_MAX}",
                    "this is probably not a safetensors file",
                )
            if _LENGTH_BYTES + length > file_bytes:
                _refuse(
                    path, f"the header has {length} bytes, but the file ends after {file_bytes}: truncated"
                )
            file.seek(_LENGTH_BYTES)
            raw = file.read(length)
    except FileNotFoundError:
        _refuse(path, "there is no such file", "download it, or open another path")
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", "check the path and its permissions")
    if len(raw) < length:
        _refuse(path, f"the header has {length} bytes, but only {len(raw)} could be read: truncated")
    return raw, file_bytes


def _metadata(path: Path, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        _refuse(path, "__metadata__ is not an object of strings")
    return value


def _tensor(path: Path, name: str, entry: object, data_begin: int, file_bytes: int) -> TensorInfo:
    if not isinstance(entry, dict):
        _refuse(path, f"the header entry of {name!r} is not an object")
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
    if missing:
        _refuse(path, f"the header entry of {name!r} has no {missing[0]}")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(path, f"{name!r} has the unknown dtype {dtype!r}", "known are " + ", ".join(DTYPE_BITS))
    shape = _naturals(path, f"the shape of {name!r}", entry["shape"])
    offsets = _naturals(path, f"data_offsets of {name!r}", entry["data_offsets"])
    if len(shape) > RANK_MAX:
        _refuse(path, f"{name!r} has {len(shape)} dimensions; the limit is {RANK_MAX}")
    if len(offsets) != 2:
        _refuse(path, f"data_offsets of {name!r} has {len(offsets)} numbers; expected begin and end")
    begin, end = offsets
    if begin > end:
        _refuse(path, f"{name!r} begins at {begin} after its end at {end}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits > _INT64_MAX:
        _refuse(path, f"{name!r} of shape {list(shape)} is larger than any file can be")
    if (end - begin) * 8 != bits:
        _refuse(path, f"{name!r} is {dtype}{list(shape)}, {-(-bits // 8)} bytes, but has {end - begin} bytes")
    if data_begin + end > file_bytes:
        _refuse(
            path,
            f"{name!r} ends at byte {data_begin + end}, but the file has {file_bytes}: it is truncated",
            "resume or repeat the download",
        )
    return TensorInfo(name, dtype, shape, data_begin + begin, data_begin + end)


def _naturals(path: Path, what: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        _refuse(path, f"{what} is not a list")
    for item in value:
        # bool is an int to Python, not to the format.
        if type(item) is not int or not 0 <= item <= _INT64_MAX:
            _refuse(path, f"{what} holds {item!r:.40}; expected integers from 0 to 2^63 - 1")
    return tuple(value)


def _check_overlap(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    ordered = sorted((t for t in tensors.values() if t.end > t.begin), key=lambda tensor: tensor.begin)
    for left, right in itertools.pairwise(ordered):
        if right.begin < left.end:
            _refuse(path, f"{left.name!r} and {right.name!r} overlap at byte {right.begin}")
