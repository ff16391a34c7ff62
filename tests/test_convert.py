"""`convert`: every row where the format says, whatever interrupts it, and nothing in place of a whole file."""

import contextlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracles import dequant
from oracles import store as oracle
from oracles.quantise import quantised, values_of
from oracles.rows import RowOracle

from engram_server.cli import main
from engram_server.convert import ConvertOptions, convert
from engram_server.convert import partial as partial_module
from engram_server.spec import EngramSpec
from engram_server.tables.bulk import BulkFile
from engram_server.tables.inspect import inspect
from engram_server.tables.store import open_store
from engram_server.tables.synth import synthesise
from engram_server.verify import verify

SMALL = ConvertOptions(chunk_bytes=64 << 10, journal_bytes=256 << 10)
"""Many chunks and journal entries, even of a small table."""


def all_rows(checkpoint: Path) -> dict[int, np.ndarray]:
    rows = RowOracle(checkpoint)
    found = {}
    for layer in rows.layers:
        planes = []
        for part in ("weight", "scale"):
            file, begin, width, count = rows._planes[layer, part]
            planes.append(np.fromfile(file, np.uint8, count * width, offset=begin).reshape(count, width))
        found[layer] = np.concatenate(planes, axis=1)
    return found


def stored_rows(store: Path) -> dict[int, np.ndarray]:
    """Every row of a store, every byte of the file checked."""
    tables = oracle.read(store.read_bytes())
    return {
        layer: np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)
        for layer, rows in tables.items()
    }


@pytest.mark.parametrize("fmt", ["fp4", "fp8"])
def test_a_store_holds_every_row_of_the_checkpoint(
    fmt: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    checkpoint: Path = request.getfixturevalue(f"{fmt}_checkpoint")
    results = convert(checkpoint, tmp_path / "a.store", ConvertOptions(verify="full"))
    expected, found = all_rows(checkpoint), stored_rows(tmp_path / "a.store")
    assert found.keys() == expected.keys()
    assert all((found[layer] == expected[layer]).all() for layer in found)
    digests = [table["digest"] for table in inspect(checkpoint)["tables"]]
    assert [table.digest.hex() for table in open_store(tmp_path / "a.store").tables] == digests
    assert results[0].fidelity is None
    assert results[0].compared_bytes == results[0].written_bytes == results[0].file_bytes - 4096
    assert verify(tmp_path / "a.store").problems == ()
    assert [path.name for path in tmp_path.iterdir()] == ["a.store"]


def test_converting_again_gives_the_same_file_whatever_the_chunks(
    fp4_checkpoint: Path, tmp_path: Path
) -> None:
    convert(fp4_checkpoint, tmp_path / "a.store")
    convert(fp4_checkpoint, tmp_path / "b.store", ConvertOptions(chunk_bytes=4096, threads=1, verify="none"))
    assert (tmp_path / "a.store").read_bytes() == (tmp_path / "b.store").read_bytes()


def test_stores_of_other_rows_have_other_uuids(tmp_path: Path) -> None:
    for seed in (1, 2):
        convert(synthesise(tmp_path / f"s{seed}", 100, "fp4", seed=seed).path, tmp_path / f"{seed}.store")
    a, b = open_store(tmp_path / "1.store"), open_store(tmp_path / "2.store")
    assert a.file_bytes == b.file_bytes
    assert a.uuid != b.uuid


@pytest.mark.parametrize("verify_mode", ["sample", "full", "none"])
def test_fp8_to_fp4(fp8_checkpoint: Path, tmp_path: Path, verify_mode: Any) -> None:
    (result,) = convert(fp8_checkpoint, tmp_path / "a.store", ConvertOptions(to="fp4", verify=verify_mode))
    source, found = all_rows(fp8_checkpoint), stored_rows(tmp_path / "a.store")
    for layer, rows in found.items():
        for row in random.Random(layer).sample(range(len(rows)), 20):
            codes, scales = quantised(values_of(source[layer][row : row + 1])[0], "fp4")
            assert rows[row].tolist() == codes + scales
    assert verify(tmp_path / "a.store").problems == ()
    assert result.fidelity is not None
    assert 0.9932 <= result.fidelity.mean_cosine <= 0.9936
    assert 0.985 < result.fidelity.min_cosine < result.fidelity.mean_cosine
    assert result.fidelity.clipped_blocks == 0
    # All rows of so small a table lie in the sample.
    assert result.fidelity.rows == sum(len(rows) for rows in source.values())


def test_one_layer_of_two(fp4_checkpoint: Path, tmp_path: Path) -> None:
    convert(fp4_checkpoint, tmp_path / "a.store", ConvertOptions(layers=(14,)))
    store = open_store(tmp_path / "a.store")
    assert [table.layer for table in store.tables] == [14]
    assert store.spec == EngramSpec.from_file(fp4_checkpoint)
    assert (stored_rows(tmp_path / "a.store")[14] == all_rows(fp4_checkpoint)[14]).all()


# -------------------------------------------------------------------------------------- DSV41EN1


def write_shard(path: Path, layer: int, first: int, rows: np.ndarray, total: int) -> None:
    head = struct.pack("<6Q", 0x31344E4531565344, layer, first, first + len(rows), total, 264)
    path.write_bytes(head.ljust(4096, b"\0") + rows.tobytes())


def test_dsv41_export(fp8_checkpoint: Path, tmp_path: Path) -> None:
    convert(fp8_checkpoint, tmp_path / "shards", ConvertOptions(to="dsv41"))
    for layer, rows in all_rows(fp8_checkpoint).items():
        write_shard(tmp_path / "expected", layer, 0, rows, len(rows))
        exported = tmp_path / "shards" / f"engram-layer-{layer:02}.dsv41"
        assert exported.read_bytes() == (tmp_path / "expected").read_bytes()
    assert EngramSpec.from_file(tmp_path / "shards") == EngramSpec.from_file(fp8_checkpoint)
    convert(fp8_checkpoint, tmp_path / "direct.store")
    convert(tmp_path / "shards", tmp_path / "back.store")
    assert (tmp_path / "back.store").read_bytes() == (tmp_path / "direct.store").read_bytes()


def test_dsv41_export_of_fp4_has_the_same_values(fp4_checkpoint: Path, tmp_path: Path) -> None:
    convert(fp4_checkpoint, tmp_path / "shards", ConvertOptions(to="dsv41", layers=(1,)))
    exported = np.fromfile(tmp_path / "shards" / "engram-layer-01.dsv41", np.uint8, offset=4096).reshape(
        -1, 264
    )
    assert (exported == dequant.convert("fp4", "packed_fp8", all_rows(fp4_checkpoint)[1])).all()
    assert [path.name for path in (tmp_path / "shards").glob("*.dsv41")] == ["engram-layer-01.dsv41"]


def test_dsv41_shards_cut_anywhere(fp8_checkpoint: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    shutil.copy(fp8_checkpoint / "config.json", tmp_path)
    (shards / "README").write_text("not a shard")
    for layer, rows in all_rows(fp8_checkpoint).items():
        cuts = [0, 1, 16, 17, 5000, 5003, len(rows) - 1, len(rows)]
        for i, (first, end) in enumerate(pairwise(cuts)):
            write_shard(shards / f"{layer}-{9 - i}.bin", layer, first, rows[first:end], len(rows))
    options = ConvertOptions(config=tmp_path / "config.json", chunk_bytes=64 << 10, verify="full")
    convert(shards, tmp_path / "a.store", options)
    convert(fp8_checkpoint, tmp_path / "b.store")
    assert (tmp_path / "a.store").read_bytes() == (tmp_path / "b.store").read_bytes()
    convert(
        shards, tmp_path / "c.store", ConvertOptions(config=tmp_path / "config.json", to="fp4", layers=(14,))
    )
    convert(fp8_checkpoint, tmp_path / "d.store", ConvertOptions(to="fp4", layers=(14,)))
    assert (tmp_path / "c.store").read_bytes() == (tmp_path / "d.store").read_bytes()


def test_dsv41_shards_that_do_not_cover_a_table(fp8_checkpoint: Path, tmp_path: Path) -> None:
    rows = all_rows(fp8_checkpoint)[1]
    total = len(rows)
    shutil.copy(fp8_checkpoint / "config.json", tmp_path / "kept.json")

    def refused(
        words: str, *pieces: tuple[int, int], layer: int = 1, rows_in_all: int = total, tail: bytes = b""
    ) -> None:
        shards = tmp_path / "shards"
        shards.mkdir()
        for i, (first, end) in enumerate(pieces):
            write_shard(shards / f"{i}.dsv41", layer, first, rows[first:end], rows_in_all)
            with (shards / f"{i}.dsv41").open("ab") as file:
                file.write(tail)
        with pytest.raises(ValueError, match=words):
            convert(shards, tmp_path / "a.store", ConvertOptions(config=tmp_path / "kept.json", layers=(1,)))
        shutil.rmtree(shards)
        assert not (tmp_path / "a.store").exists()

    refused("both hold row 90 of layer 1; keep one", (0, 100), (90, total))
    refused("rows 100 to 109 of layer 1 are missing between", (0, 100), (110, total))
    refused(rf"hold rows 5 to {total - 1} of {total}; download the others", (5, total))
    refused(rf"hold rows 0 to {total - 2} of {total}; download the others", (0, total - 1))
    refused(r"has .* bytes, but its header describes", (0, total), tail=b"x")
    refused(
        f"says layer 1 has {total + 1} rows, but the config gives it {total}",
        (0, total),
        rows_in_all=total + 1,
    )
    refused("says it holds rows .* which is no range", (0, total), rows_in_all=5)
    refused("no DSV41EN1 shard of layer 1; download it", (0, total), layer=14)
    refused("holds a shard of layer 3, but", (0, total), layer=3)
    write_shard(tmp_path / "whole.dsv41", 1, 0, rows, total)
    with pytest.raises(ValueError, match=r"config\.json is not there; .* give the model's with --config"):
        convert(tmp_path / "whole.dsv41", tmp_path / "a.store")
    os.truncate(tmp_path / "whole.dsv41", 4096 + 264)
    with pytest.raises(ValueError, match="has 4360 bytes, but its header describes"):
        convert(tmp_path / "whole.dsv41", tmp_path / "a.store")


# -------------------------------------------------------------------------------- rows to refuse


def planted(tmp_path: Path, fmt: str, changes: dict[tuple[int, str], dict[int, tuple[int, int]]]) -> Path:
    """A checkpoint with bytes changed: (layer, part) -> row -> (place, value)."""
    checkpoint = synthesise(tmp_path / "planted", 100, fmt, seed=3).path  # type: ignore[arg-type]
    rows = RowOracle(checkpoint)
    for (layer, part), places in changes.items():
        file, begin, width, _ = rows._planes[layer, part]
        with file.open("r+b") as opened:
            for row, (place, value) in places.items():
                opened.seek(begin + row * width + place)
                opened.write(bytes([value]))
    return checkpoint


BAD = {
    (1, "weight"): {7: (0, 0x7F), 2000: (255, 0xFF)},
    (14, "weight"): {9: (100, 0xFF)},
    (14, "scale"): {9: (0, 255), 3333: (7, 255)},
}
NAMED = (
    "4 rows .*layer 1 row 7: a NaN code; layer 1 row 2000: a NaN code; "
    "layer 14 row 9: a NaN code and scale byte 255; layer 14 row 3333: scale byte 255"
)


@pytest.mark.parametrize("to", ["fp8", "fp4", "dsv41"])
def test_nan_and_infinity_are_refused_by_row(tmp_path: Path, to: Any) -> None:
    checkpoint = planted(tmp_path, "fp8", BAD)
    layers = (14,) if to == "dsv41" else None
    words = "2 rows .*layer 14 row 9.*layer 14 row 3333" if to == "dsv41" else NAMED
    with pytest.raises(ValueError, match=words):
        convert(checkpoint, tmp_path / "out", ConvertOptions(to=to, layers=layers))
    assert [path.name for path in tmp_path.iterdir()] == ["planted"], "nothing is left behind"


def test_nan_and_infinity_are_taken_when_asked(tmp_path: Path) -> None:
    checkpoint = planted(tmp_path, "fp8", BAD)
    (result,) = convert(checkpoint, tmp_path / "a.store", ConvertOptions(allow_nan=True))
    assert (result.suspect_rows, len(result.suspects)) == (4, 4)
    assert all(
        (rows == all_rows(checkpoint)[layer]).all()
        for layer, rows in stored_rows(tmp_path / "a.store").items()
    )
    with pytest.raises(ValueError, match="FP4 has no NaN: convert to fp8"):
        convert(checkpoint, tmp_path / "b.store", ConvertOptions(allow_nan=True, to="fp4"))


def test_scale_byte_255_in_fp4_is_refused_too(tmp_path: Path) -> None:
    checkpoint = planted(tmp_path, "fp4", {(1, "scale"): {5: (3, 255)}})
    with pytest.raises(ValueError, match=r"1 rows .*layer 1 row 5: scale byte 255"):
        convert(checkpoint, tmp_path / "a.store")


def test_values_beyond_fp4_are_refused(tmp_path: Path) -> None:
    checkpoint = planted(tmp_path, "fp8", {(1, "weight"): {5: (0, 0x7E)}, (1, "scale"): {5: (0, 254)}})
    with pytest.raises(ValueError, match=r"1 blocks .* beyond 6 \* 2\^127"):
        convert(checkpoint, tmp_path / "a.store", ConvertOptions(to="fp4"))
    assert not list(tmp_path.glob("a.store*"))


# ------------------------------------------------------------------------------------ interruptions

_CONVERT_SMALL = """
import sys
from pathlib import Path
from engram_server.convert import ConvertOptions, convert
source, out, to = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
convert(source, out, ConvertOptions(to=to, resume=True, chunk_bytes=16 << 10, journal_bytes=128 << 10))
"""


@pytest.mark.parametrize("to", ["fp4", "fp8", "dsv41"])
def test_killed_and_resumed_gives_the_same_file(fp8_checkpoint: Path, tmp_path: Path, to: Any) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert(fp8_checkpoint, whole, ConvertOptions(to=to))
    arguments = [sys.executable, "-c", _CONVERT_SMALL, str(fp8_checkpoint), str(out), to]
    rng, kills, resumed = random.Random(to), 0, 0
    names = [path.relative_to(whole) for path in whole.rglob("*")] if whole.is_dir() else [Path()]
    while not all((out / name).exists() for name in names):
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE)
        if kills < 6:
            # At a random moment after some progress; if there is none to see, it is over already.
            _wait_for_partial(process, tmp_path)
            time.sleep(rng.uniform(0, 0.1))
            process.kill()
            kills += 1
        _, errors = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        resumed += any(_journalled(partial) > 4096 for partial in tmp_path.rglob("*.partial"))
    for name in names:
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert not list(tmp_path.rglob("*.partial"))
    assert kills > 0


def _wait_for_partial(process: subprocess.Popen[bytes], root: Path) -> None:
    while process.poll() is None and not any(_journalled(path) >= 0 for path in root.rglob("*.partial")):
        time.sleep(0.005)


def _journalled(partial: Path) -> int:
    """Bytes that the journal of an unfinished file says are on disk."""
    with contextlib.suppress(OSError, struct.error):
        page = partial.read_bytes()[:60]
        magic, _, done = struct.unpack_from("<8s32sQ", page)
        if magic == b"\x89ENGRAM~" and oracle.crc32c(page[:56]) == struct.unpack_from("<I", page, 56)[0]:
            return int(done)
    return -1


@pytest.fixture
def interrupted(fp4_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """OUT of a conversion that a failing disk stopped halfway; the disk works again."""
    out, write, calls = tmp_path / "a.store", BulkFile.write, 0

    def failing(self: BulkFile, offset: int, data: Any) -> None:
        nonlocal calls
        calls += offset > 0
        if calls > 40 and offset > 0:
            raise OSError(5, "Input/output error", str(self.path))
        write(self, offset, data)

    monkeypatch.setattr(BulkFile, "write", failing)
    with pytest.raises(ValueError, match=r"Input/output error; what was converted is in .*a\.store\.partial"):
        convert(fp4_checkpoint, out, SMALL)
    monkeypatch.undo()
    assert not out.exists()
    return out


def test_an_interrupted_conversion_is_explained_resumed_or_replaced(
    interrupted: Path, fp4_checkpoint: Path, tmp_path: Path
) -> None:
    partial = interrupted.with_name("a.store.partial")
    done = _journalled(partial)
    assert done > 4096
    with pytest.raises(ValueError, match="does not begin as a packed store does"):
        open_store(partial)
    with pytest.raises(
        ValueError, match=r"a\.store\.partial is an interrupted conversion; go on with --resume"
    ):
        convert(fp4_checkpoint, interrupted)
    convert(fp4_checkpoint, tmp_path / "b.store")
    (result,) = convert(fp4_checkpoint, interrupted, ConvertOptions(resume=True))
    assert result.written_bytes == result.file_bytes - done
    assert interrupted.read_bytes() == (tmp_path / "b.store").read_bytes()
    assert not partial.exists()


def test_force_starts_again(interrupted: Path, fp4_checkpoint: Path) -> None:
    (result,) = convert(fp4_checkpoint, interrupted, ConvertOptions(force=True))
    assert result.written_bytes == result.file_bytes - 4096


def test_resuming_from_another_source_is_refused(
    interrupted: Path, fp4_checkpoint: Path, fp8_checkpoint: Path, tmp_path: Path
) -> None:
    words = "begun from another source, in another format or from files that changed since"
    copy = shutil.copytree(fp4_checkpoint, tmp_path / "copy")
    os.utime(copy / "model-00048-of-00048.safetensors", ns=(0, 0))
    for source, options in (
        (fp8_checkpoint, ConvertOptions(resume=True)),
        (fp4_checkpoint, ConvertOptions(resume=True, layers=(1,))),
        (copy, ConvertOptions(resume=True)),
    ):
        with pytest.raises(ValueError, match=words):
            convert(source, interrupted, options)
    assert _journalled(interrupted.with_name("a.store.partial")) > 4096


def test_a_damaged_journal_costs_the_work_and_nothing_else(interrupted: Path, fp4_checkpoint: Path) -> None:
    partial = interrupted.with_name("a.store.partial")
    with partial.open("r+b") as file:
        file.seek(41)
        file.write(b"\xff")
    (result,) = convert(fp4_checkpoint, interrupted, ConvertOptions(resume=True))
    assert result.written_bytes == result.file_bytes - 4096
    assert verify(interrupted).problems == ()


def test_resuming_what_is_whole_does_nothing(fp4_checkpoint: Path, tmp_path: Path) -> None:
    convert(fp4_checkpoint, tmp_path / "a.store")
    (result,) = convert(fp4_checkpoint, tmp_path / "a.store", ConvertOptions(resume=True))
    assert result.written_bytes == 0


def test_ctrl_c_keeps_what_was_done(fp4_checkpoint: Path, tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
from engram_server import cli
from engram_server.convert import command, partial
advance, sent = partial.Partial.advance, False
def interrupting(self, begin, end, suspect_rows):
    global sent
    time.sleep(0.05 if sent else 0.01)  # some of the hundreds of chunks are always left
    advance(self, begin, end, suspect_rows)
    if self.progress.done > 1 << 16 and not sent:  # something, without a gap, is done
        sent = True
        os.kill(os.getpid(), signal.SIGINT)
partial.Partial.advance = interrupting
defaults = list(command.ConvertOptions.__init__.__defaults__)
defaults[-2] = 64 << 10
command.ConvertOptions.__init__.__defaults__ = tuple(defaults)
sys.exit(cli.main(["convert", {str(fp4_checkpoint)!r}, {str(tmp_path / "a.store")!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 130, done.stderr
    assert "stopped; what was converted is kept beside" in done.stderr
    assert "go on with --resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert _journalled(tmp_path / "a.store.partial") > 4096
    convert(fp4_checkpoint, tmp_path / "a.store", ConvertOptions(resume=True))
    assert verify(tmp_path / "a.store").problems == ()


def test_two_conversions_do_not_write_one_file(interrupted: Path, fp4_checkpoint: Path) -> None:
    partial = interrupted.with_name("a.store.partial")
    holder = (
        "import fcntl, sys, time; "
        f"f = open({str(partial)!r}); fcntl.flock(f, fcntl.LOCK_EX); print(); sys.stdout.flush(); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for options in (ConvertOptions(resume=True), ConvertOptions(force=True)):
            with pytest.raises(ValueError, match="is being written by another conversion; wait"):
                convert(fp4_checkpoint, interrupted, options)
        process.kill()
    assert _journalled(partial) > 4096


# ---------------------------------------------------------------------------------- disks and names


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_too_small_a_disk_is_refused_before_anything_is_written(
    fp4_checkpoint: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(fp4_checkpoint), str(small_disk / "a.store")]) == 1
    assert "GB free, but a.store takes" in capsys.readouterr().err
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("reserving", [True, False])
def test_a_disk_that_fills_up_gets_a_sentence_and_no_debris(
    fp4_checkpoint: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, reserving: bool
) -> None:
    """Whether space runs out when it is reserved or, where that cannot be done, while rows are written."""
    monkeypatch.setattr(partial_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    if not reserving:
        monkeypatch.setattr(partial_module._core, "reserve_file", lambda fd, size: 95)
    with pytest.raises(ValueError, match=r"disk is full.* free some space"):
        convert(fp4_checkpoint, small_disk / "a.store", SMALL)
    assert list(small_disk.iterdir()) == []


def test_names_that_cannot_be_written(
    fp4_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.store"
    out.write_bytes(b"something of the user's")
    for arguments, words in (
        ([str(out)], "a.store exists; name another file, or replace it by --force"),
        ([str(out), "--resume"], "a.store exists"),
        ([str(tmp_path)], "is a directory; a packed store is one file: name that"),
        ([str(tmp_path / "absent" / "a")], "absent is not a directory; make it"),
        ([str(tmp_path / "b"), "--layers", "2"], "--layers names 2, but"),
        ([str(tmp_path / "b"), "--config", "x"], "holds no DSV41EN1 shards"),
    ):
        assert main(["convert", str(fp4_checkpoint), *arguments]) == 1
        assert words in capsys.readouterr().err
    assert out.read_bytes() == b"something of the user's"
    assert main(["convert", str(fp4_checkpoint), str(out), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["path"] == str(out)
    assert main(["convert", str(out), str(tmp_path / "b")]) == 1
    assert "is a packed store already" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "b")]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_nothing_but_files_of_ours_is_written_over(
    fp8_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--force replaces an old store; not the source, nor what a link or a device stands for."""
    shards = tmp_path / "shards"
    assert main(["convert", str(fp8_checkpoint), str(shards), "--to", "dsv41"]) == 0
    first = shards / "engram-layer-01.dsv41"
    shutil.copy(first, shards / "a.partial")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "b.store.partial").symlink_to(first)
    before = {path: path.read_bytes() for path in shards.iterdir()}
    for source, out, words in (
        (first, [first], "is what would be converted"),
        (first, [shards, "--to", "dsv41", "--layers", "1"], "is what would be converted"),
        (shards / "a.partial", [shards / "a"], "is what would be converted"),
        (fp8_checkpoint, [tmp_path / "pipe"], "pipe exists and is not a regular file"),
        (fp8_checkpoint, [tmp_path / "b.store"], "b.store.partial exists and is not a regular file"),
    ):
        assert main(["convert", str(source), *map(str, out), "--force"]) == 1
        assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in shards.iterdir()} == before


def test_shards_of_other_rows_are_not_whole_already(fp8_checkpoint: Path, tmp_path: Path) -> None:
    """Their headers say as much as those of the source's own would."""
    other = synthesise(tmp_path / "other", 2000, "fp8", seed=9).path
    out = tmp_path / "shards"
    convert(fp8_checkpoint, out, ConvertOptions(to="dsv41"))
    again = ConvertOptions(to="dsv41", resume=True)
    assert [result.written_bytes for result in convert(fp8_checkpoint, out, again)] == [0, 0]
    with pytest.raises(ValueError, match=r"engram-layer-01.dsv41 exists; name another file"):
        convert(other, out, again)


def test_a_source_that_is_written_to_meanwhile_is_noticed(
    fp4_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sample that is compared does not look."""
    source = tmp_path / "checkpoint"
    shutil.copytree(fp4_checkpoint, source)
    (table,) = source.glob("*00048-of*")
    advance = partial_module.Partial.advance

    def touching(self: partial_module.Partial, begin: int, end: int, suspect_rows: int) -> None:
        os.utime(table)
        advance(self, begin, end, suspect_rows)

    monkeypatch.setattr(partial_module.Partial, "advance", touching)
    with pytest.raises(ValueError, match="was written to meanwhile"):
        convert(source, tmp_path / "a.store", ConvertOptions(verify="none"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_disk_that_changes_what_was_written_is_caught(
    fp4_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = BulkFile.write

    def lying(self: BulkFile, offset: int, data: Any) -> None:
        if offset > 100_000:
            data[700] ^= 1
        write(self, offset, data)

    monkeypatch.setattr(BulkFile, "write", lying)
    with pytest.raises(
        ValueError,
        match=r"reading back, rows \d+ to \d+ of layer \d+ are not what the source says",
    ):
        convert(fp4_checkpoint, tmp_path / "a.store", ConvertOptions(chunk_bytes=64 << 10, verify="full"))
    assert not list(tmp_path.iterdir())


def test_files_without_direct_io(
    fp4_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused when a file is opened, or only at the first read or write."""
    open_file, preadv, pwritev = os.open, os.preadv, os.pwritev
    convert(fp4_checkpoint, tmp_path / "a.store")

    def is_direct(fd: int) -> bool:
        import fcntl

        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def refusing(call: Any) -> Any:
        def checked(fd: int, buffers: Any, offset: int) -> int:
            if is_direct(fd):
                raise OSError(22, "Invalid argument")
            return int(call(fd, buffers, offset))

        return checked

    def open_refused(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_file(path, flags, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refusing(preadv))
        patched.setattr(os, "pwritev", refusing(pwritev))
        convert(fp4_checkpoint, tmp_path / "b.store", SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_refused)
        convert(fp4_checkpoint, tmp_path / "c.store", SMALL)
    for name in ("b.store", "c.store"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "a.store").read_bytes()


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """1.3 GB of sparse tables, and a few buffers."""
    source = synthesise(tmp_path / "sparse", 200_000, "fp4", sparse=True).path
    code = f"""
import re, sys
from pathlib import Path
from engram_server.cli import main
assert main(["convert", {str(source)!r}, {str(tmp_path / "a.store")!r}]) == 0
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    assert int(done.stdout.split()[-1]) * 1024 < 300_000_000
    planted_rows = json.loads((source / "planted.json").read_text())["layers"]
    store = open_store(tmp_path / "a.store")
    content = (tmp_path / "a.store").open("rb")
    for table in store.tables:
        rows = planted_rows[str(table.layer)]
        for row, packed in zip(rows["ids"], rows["packed_hex"], strict=True):
            content.seek(table.offset + row // 29 * 4096 + row % 29 * 140)
            assert content.read(136).hex() == packed
    content.close()
