"""The header parser: what it finds in good files, and its sentence for each bad one."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from oracles.files import safetensors_bytes

from engram_server.tables import safetensors as ours
from engram_server.tables.errors import TableError
from engram_server.tables.safetensors import Header, build_header, parse_json_object, read_header


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def test_finds_what_the_safetensors_library_wrote(file: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "empty": np.zeros((0, 5), dtype=np.int64),
        "scalar": np.array(7, dtype=np.int16),
        "b": np.arange(5, dtype=np.uint8),
    }
    safetensors.numpy.save_file(arrays, file, metadata={"format": "np"})
    header = read_header(file)
    content = file.read_bytes()
    assert header.metadata == {"format": "np"}
    assert header.file_bytes == len(content)
    assert header.unowned_bytes == 0
    assert set(header.tensors) == set(arrays)
    for name, array in arrays.items():
        tensor = header.tensors[name]
        assert tensor.shape == array.shape
        assert content[tensor.begin : tensor.end] == array.tobytes()
    assert {name: tensor.dtype for name, tensor in header.tensors.items()} == {
        "a": "F32",
        "empty": "I64",
        "scalar": "I16",
        "b": "U8",
    }


@pytest.mark.parametrize("residue", range(8))
def test_safetensors_library_reads_our_headers(file: Path, residue: int) -> None:
    head, located = build_header([("x", "U8", (3, 2)), ("y", "F32", (2,))], {"format": "pt"}, residue)
    assert len(head) % 8 == residue
    file.write_bytes(head + bytes(range(6)) + np.array([1.5, -2.0], dtype="<f4").tobytes())
    with safetensors.safe_open(file, framework="np") as theirs:
        assert theirs.metadata() == {"format": "pt"}
        assert theirs.get_tensor("x").tolist() == [[0, 1], [2, 3], [4, 5]]
        assert theirs.get_tensor("y").tolist() == [1.5, -2.0]
    assert list(read_header(file).tensors.values()) == located


def test_bytes_that_no_tensor_owns_are_let_be(file: Path) -> None:
    file.write_bytes(safetensors_bytes({"a": entry(offsets=[3, 7])}, bytes(10)))
    header = read_header(file)
    assert header.unowned_bytes == 6
    assert header.tensors["a"].begin == header.data_begin + 3


def test_reads_the_header_only(file: Path) -> None:
    size = 1 << 40
    file.write_bytes(safetensors_bytes({"a": entry(shape=[size], offsets=[0, size])}))
    with file.open("r+b") as sparse:
        sparse.truncate(file.stat().st_size + size)
    assert read_header(file).tensors["a"].end == file.stat().st_size


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "has 7 bytes; a safetensors file has at least 8"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 94\n",
        "Git LFS pointer, not the file; run `git lfs pull`",
    ),
    "a text file": (
        b"<!DOCTYPE html><html>",
        "first 8 bytes say the header has .* probably not a safetensors",
    ),
    "header over the limit": (
        struct.pack("<Q", 100_000_001) + b"{}",
        "100000001 bytes; the limit is 100000000",
    ),
    "header longer than the file": (
        safetensors_bytes({}, length=99),
        "header has 99 bytes, but the file ends",
    ),
    "no header": (safetensors_bytes(b""), "is not JSON"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "not UTF-8 .* at byte 2"),
    "not JSON": (safetensors_bytes(b'{"a": }'), "is not JSON"),
    "cut JSON": (safetensors_bytes(b'{"a": {"dtype": "U8"'), "is not JSON"),
    "NaN": (safetensors_bytes(b'{"a": NaN}'), "NaN is not a JSON value"),
    "huge number": (safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "is not JSON"),
    "nested too deeply": (safetensors_bytes(b"[" * 100_000), "nested too deeply"),
    "a list": (safetensors_bytes([]), "not an object"),
    "duplicate tensor": (
        safetensors_bytes(b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": 1}'),
        "the key 'a' twice",
    ),
    "duplicate key in an entry": (safetensors_bytes(b'{"a": {"shape": [1], "shape": [2]}}'), "'shape' twice"),
    "metadata of numbers": (
        safetensors_bytes({"__metadata__": {"a": 1}}),
        "__metadata__ is not an object of str",
    ),
    "metadata is a list": (safetensors_bytes({"__metadata__": []}), "__metadata__ is not an object of str"),
    "entry is a list": (safetensors_bytes({"a": []}), "entry of 'a' is not an object"),
    "no dtype": (safetensors_bytes({"a": {"shape": [], "data_offsets": [0, 1]}}), "'a' has no dtype"),
    "no shape": (safetensors_bytes({"a": {"dtype": "U8", "data_offsets": [0, 1]}}), "'a' has no shape"),
    "no offsets": (safetensors_bytes({"a": {"dtype": "U8", "shape": [1]}}), "'a' has no data_offsets"),
    "unknown dtype": (safetensors_bytes({"a": entry(dtype="F8_E9M9")}), "unknown dtype 'F8_E9M9'.*F8_E8M0"),
    "dtype is a list": (safetensors_bytes({"a": entry(dtype=["U8"])}), "unknown dtype"),
    "shape is a number": (safetensors_bytes({"a": entry(shape=4)}), "shape of 'a' is not a list"),
    "negative shape": (safetensors_bytes({"a": entry(shape=[-4])}), "shape of 'a' holds -4"),
    "fractional shape": (safetensors_bytes({"a": entry(shape=[4.0])}), "shape of 'a' holds 4.0"),
    "boolean shape": (safetensors_bytes({"a": entry(shape=[True, 4])}), "shape of 'a' holds True"),
    "65 dimensions": (safetensors_bytes({"a": entry(shape=[1] * 65)}), "65 dimensions; the limit is 64"),
    "shape product overflows": (
        safetensors_bytes({"a": entry(shape=[2**32, 2**32], offsets=[0, 0])}),
        "larger than any file",
    ),
    "one offset": (safetensors_bytes({"a": entry(offsets=[0])}), "1 numbers; expected begin and end"),
    "offset is text": (safetensors_bytes({"a": entry(offsets=["0", 4])}), "data_offsets of 'a' holds '0'"),
    "negative offset": (safetensors_bytes({"a": entry(offsets=[-4, 0])}), "data_offsets of 'a' holds -4"),
    "begin after end": (safetensors_bytes({"a": entry(offsets=[4, 0])}), "begins at 4 after its end at 0"),
    "size disagrees": (safetensors_bytes({"a": entry(offsets=[0, 5])}, bytes(5)), "4 bytes, but has 5 bytes"),
    "half a byte": (safetensors_bytes({"a": entry("F4", [3], [0, 2])}, bytes(2)), "2 bytes, but has 2 bytes"),
    "truncated data": (safetensors_bytes({"a": entry()}, bytes(3)), "it is truncated; resume or repeat"),
    "overlap": (
        safetensors_bytes({"a": entry(), "b": entry(offsets=[3, 7])}, bytes(7)),
        "'a' and 'b' overlap at byte",
    ),
    "same range twice": (safetensors_bytes({"a": entry(), "b": entry()}, bytes(4)), "'a' and 'b' overlap"),
}


@pytest.mark.parametrize(("content", "words"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_file_gets_its_sentence(file: Path, content: bytes, words: str) -> None:
    file.write_bytes(content)
    with pytest.raises(TableError, match=words) as error:
        read_header(file)
    assert str(error.value).startswith(f"{file}: ")
    assert "; " in str(error.value), "says what to do"


def test_too_many_tensors(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "TENSORS_MAX", 1)
    file.write_bytes(safetensors_bytes({"a": entry(), "b": entry(offsets=[4, 8])}, bytes(8)))
    with pytest.raises(TableError, match="lists 2 tensors; the limit is 1"):
        read_header(file)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="there is no such file; download it"):
        read_header(tmp_path / "absent")
    with pytest.raises(TableError, match="is not a regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TableError, match="is not a regular file"):
        read_header(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with pytest.raises(TableError, match="cannot be read: Not a directory"):
        read_header(tmp_path / "file" / "x")


def header_or_sentence(file: Path) -> Header | str:
    try:
        return read_header(file)
    except TableError as error:
        return str(error)


@given(st.binary(max_size=64))
def test_any_bytes_give_a_header_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "junk.safetensors"
    for content in (junk, safetensors_bytes(junk)):
        file.write_bytes(content)
        header_or_sentence(file)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_gives_a_header_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, value: object
) -> None:
    file = tmp_path_factory.getbasetemp() / "json.safetensors"
    file.write_bytes(safetensors_bytes({"t": value} if not isinstance(value, dict) else value, bytes(8)))
    header = header_or_sentence(file)
    if isinstance(header, Header):
        assert all(tensor.end <= header.file_bytes for tensor in header.tensors.values())


def test_duplicate_keys_are_found_at_any_depth() -> None:
    with pytest.raises(TableError, match="the thing has the key 'k' twice"):
        parse_json_object(Path("f"), "the thing", b'{"a": [{"k": 1, "k": 1}]}')
    assert parse_json_object(Path("f"), "x", json.dumps({"a": {"k": 1}, "b": {"k": 1}}).encode())
