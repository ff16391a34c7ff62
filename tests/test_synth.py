"""Synthetic checkpoints: their rows, their files, and what happens when writing is cut short."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
from oracles.quantise import quantised, values_of
from oracles.rows import RowOracle

from engram_server.spec import EngramSpec, SpecError
from engram_server.tables import synth, synth_table
from engram_server.tables.checkpoint import open_checkpoint
from engram_server.tables.errors import TableError
from engram_server.tables.synth import synthesise

TINY = 2
"""engram_vocab_size of tables with 963 and 3,698 rows."""


def digests(root: Path) -> dict[str, str]:
    """Of every file but the one of holes."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.iterdir())
        if file.name != "model-00001-of-00048.safetensors"
    }


# ------------------------------------------------------------------------------------------ rows


def test_every_row_is_distinct(fp4_checkpoint: Path, fp8_checkpoint: Path) -> None:
    for root in (fp4_checkpoint, fp8_checkpoint):
        oracle = RowOracle(root)
        rows = [oracle.packed(layer, np.arange(15_000))[:, :-8] for layer in (1, 14)]
        together = np.ascontiguousarray(np.concatenate(rows)).view(f"V{rows[0].shape[1]}")
        assert len(np.unique(together)) == sum(map(len, rows))


def test_rows_are_finite_and_their_scales_ordinary(fp8_checkpoint: Path) -> None:
    packed = RowOracle(fp8_checkpoint).packed(14, np.arange(20_000))
    assert not (packed[:, :-8] & 0x7F == 0x7F).any(), "no NaN codes"
    scales = packed[:, -8:]
    assert scales.min() >= 1
    assert scales.max() <= 254
    assert len(np.unique(scales[:, 0])) > 30, "a random scale per row"


def test_rows_are_gaussian_with_one_scale(fp8_checkpoint: Path) -> None:
    values = values_of(RowOracle(fp8_checkpoint).packed(1, np.arange(20_000)))
    values /= values.std(axis=1, keepdims=True)
    assert abs(values.mean()) < 0.003
    assert abs((values**4).mean() - 3) < 0.06, "kurtosis of a Gaussian"
    assert abs(np.signbit(values).mean() - 0.5) < 0.002
    assert np.abs(np.signbit(values).mean(axis=0) - 0.5).max() < 0.02, "in every position"


def test_fp4_rows_are_the_repack_of_fp8_rows(tmp_path: Path) -> None:
    for fmt in ("fp4", "fp8"):
        synthesise(tmp_path / fmt, TINY, fmt, seed=7)
    ids = np.arange(12)
    wide = values_of(RowOracle(tmp_path / "fp8").packed(14, ids))
    for row, packed in zip(wide, RowOracle(tmp_path / "fp4").packed(14, ids), strict=True):
        codes, scales = quantised(row, "fp4")
        assert packed.tolist() == codes + scales


def test_repack_loses_what_the_real_tables_lose(tmp_path: Path) -> None:
    for fmt in ("fp4", "fp8"):
        synthesise(tmp_path / fmt, TINY, fmt, seed=7)
    wide, narrow = (
        values_of(RowOracle(tmp_path / fmt).packed(14, np.arange(3_698))) for fmt in ("fp8", "fp4")
    )
    dots = (wide * narrow).sum(axis=1)
    cosines = dots / np.linalg.norm(wide, axis=1) / np.linalg.norm(narrow, axis=1)
    assert 0.9932 < cosines.mean() < 0.9936, "0.9934 of the released tables"


# ----------------------------------------------------------------------------------------- files


def test_files_follow_the_real_checkpoint(fp4_checkpoint: Path, fp8_checkpoint: Path) -> None:
    for root, dtype, width in ((fp4_checkpoint, "U8", 128), (fp8_checkpoint, "F8_E4M3", 256)):
        spec = EngramSpec.from_file(root)
        assert spec.is_v41
        index = json.loads((root / "model.safetensors.index.json").read_text())
        found = {}
        for file in sorted(set(index["weight_map"].values())):
            with safetensors.safe_open(root / file, framework="np") as shard:
                for name in shard.keys():  # noqa: SIM118 (it is not a mapping)
                    tensor = shard.get_slice(name)
                    found[name] = (tensor.get_dtype(), tensor.get_shape(), file)
        assert {name: file for name, (_, _, file) in found.items()} == index["weight_map"]
        for layer, rows, file in ((1, spec.rows[0], 47), (14, spec.rows[1], 48)):
            shard_name, prefix = f"model-{file:05}-of-00048.safetensors", f"layers.{layer}.engram."
            assert found[prefix + "embed.weight"] == (dtype, [rows, width], shard_name)
            assert found[prefix + "embed.scale"] == ("F8_E8M0", [rows, 8], shard_name)
            assert sum(where == shard_name for _, _, where in found.values()) == 2, "tables stand alone"
            small = {name.removeprefix(prefix): found[name][:2] for name in found if name.startswith(prefix)}
            assert small["wkv.weight"] == ("F8_E4M3", [25600, 6144])
            assert small["wkv.scale"] == ("F8_E8M0", [800, 192])
            assert small["q_weight"] == small["k_weight"] == ("BF16", [4, 5120])
        hints = json.loads((root / "config.json").read_text())["quantization_config"]
        assert hints.get("engram_dtype") == ("fp4" if width == 128 else None)


def test_tokenizer_comes_along(fp4_checkpoint: Path) -> None:
    tokenizer = json.loads((fp4_checkpoint / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) > 120_000


def test_same_parameters_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthesise(tmp_path / "a", TINY, "fp8", seed=3)
    monkeypatch.setattr(synth_table, "_CHUNK_ROWS", 100)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    synthesise(tmp_path / "b", TINY, "fp8", seed=3)
    assert digests(tmp_path / "a") == digests(tmp_path / "b"), "whatever the chunks and threads"
    synthesise(tmp_path / "c", TINY, "fp8", seed=4)
    first, other = digests(tmp_path / "a"), digests(tmp_path / "c")
    assert {name for name in first if first[name] != other[name]} == {
        "model-00047-of-00048.safetensors",
        "model-00048-of-00048.safetensors",
        "synth.json",
    }


def test_other_layers(tmp_path: Path) -> None:
    result = synthesise(tmp_path, TINY, layers=(0, 3, 5))
    assert [table.layer for table in open_checkpoint(tmp_path).tables] == [0, 3, 5]
    assert result.rows == open_checkpoint(tmp_path).spec.rows


# ------------------------------------------------------------------------------- running it again


def test_complete_checkpoint_is_left_alone(tmp_path: Path) -> None:
    first = synthesise(tmp_path, TINY)
    assert not first.complete_before
    assert first.written_bytes == 136 * sum(first.rows)
    times = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    again = synthesise(tmp_path, TINY)
    assert again.complete_before
    assert again.written_bytes == 0
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == times
    (tmp_path / "config.json").unlink()
    assert not synthesise(tmp_path, TINY).complete_before
    assert len(open_checkpoint(tmp_path).tables) == 2


def test_interrupted_checkpoint_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthesise(tmp_path / "whole", TINY)
    real, calls = os.pwrite, []

    def disk_full(fd: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(data) > 400_000:  # only the codes of layer 14 are that large
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: max(1, len(data) // 2)], offset)  # and every write is short

    monkeypatch.setattr(os, "pwrite", disk_full)
    monkeypatch.setattr(synth.importlib.util, "find_spec", lambda _: None)  # no large tokenizer.json
    with pytest.raises(OSError, match="No space left"):
        synthesise(tmp_path / "cut", TINY)
    monkeypatch.undo()
    names = {file.name for file in (tmp_path / "cut").iterdir()}
    assert "model-00047-of-00048.safetensors" in names
    assert "model-00048-of-00048.safetensors" not in names, "a file has its name when it is whole"
    assert not any(name.endswith(".partial") for name in names)
    result = synthesise(tmp_path / "cut", TINY)
    assert result.written_bytes == 136 * result.rows[1], "only what was missing"
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


def test_directory_with_anything_else_is_refused(tmp_path: Path) -> None:
    synthesise(tmp_path / "synth", TINY)
    with pytest.raises(TableError, match=r"another synthetic checkpoint \(seed 0, not 1\); name an empty"):
        synthesise(tmp_path / "synth", TINY, seed=1)
    with pytest.raises(TableError, match="format fp4, not fp8; sparse False, not True"):
        synthesise(tmp_path / "synth", TINY, "fp8", sparse=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    for mark in (None, "{", "[]", "{}"):
        if mark is not None:
            (tmp_path / "other" / "synth.json").write_text(mark)
        with pytest.raises(TableError, match="is not empty and not a synthetic checkpoint; name an empty"):
            synthesise(tmp_path / "other", TINY)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(TableError, match="being written by another synth; wait for it"):
        synthesise(tmp_path, TINY)
    os.close(fd)
    synthesise(tmp_path, TINY)


def test_too_little_space_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**11))
    with pytest.raises(TableError, match=r"100\.0 GB free, but the tables take 104\.5 GB; free some space"):
        synthesise(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fmt": "fp5"}, "format is 'fp5'; expected fp4 or fp8"),
        ({"engram_vocab_size": 1}, "engram_vocab_size is 1; expected 2 to"),
        ({"engram_vocab_size": 2**33}, "engram_vocab_size is 8589934592"),
        ({"seed": -1}, "seed is -1; expected 0 to"),
        ({"layers": ()}, "0 layers asked for; expected 1 to 47"),
        ({"layers": range(48)}, "48 layers asked for"),
        ({"layers": (14, 1)}, "engram_layer_ids must ascend"),
    ],
)
def test_bad_parameters(tmp_path: Path, arguments: dict[str, object], words: str) -> None:
    with pytest.raises((TableError, SpecError), match=words):
        synthesise(tmp_path / "x", **({"engram_vocab_size": TINY} | arguments))
    assert not (tmp_path / "x").exists()


def test_progress_is_two_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthesise(tmp_path, TINY, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "MB/s" in lines[1]


# ---------------------------------------------------------------------------------------- sparse


@pytest.mark.parametrize(("fmt", "code_bytes"), [("fp4", 128), ("fp8", 256)])
def test_sparse_tables_of_the_full_size(tmp_path: Path, fmt: str, code_bytes: int) -> None:
    synthesise(tmp_path, fmt=fmt, sparse=True, seed=5)
    planted = json.loads((tmp_path / "planted.json").read_text())["layers"]
    oracle = RowOracle(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec.rows == (384_006_168, 384_016_682)
    assert list(planted) == ["1", "14"]
    for table in checkpoint.tables:
        file = table.codes.path
        assert file.stat().st_size > table.rows * (code_bytes + 8)
        assert file.stat().st_blocks * 512 < 16 << 20, "sparse"
        ids, rows = planted[str(table.layer)]["ids"], planted[str(table.layer)]["packed_hex"]
        assert ids == sorted(set(ids))
        assert [row.tobytes().hex() for row in oracle.packed(table.layer, ids)] == rows
        assert len(set(rows)) == len(rows)
        assert {0, table.rows - 1} <= set(ids)
        for plane, stride in ((table.codes, code_bytes), (table.scales, 8)):
            assert plane.stride == stride
            for boundary in range(2**31, file.stat().st_size, 2**31):
                row = (boundary - plane.offset) // stride  # the row this byte of the file is in
                if 0 < row < table.rows - 1:
                    assert {row - 1, row, row + 1} <= set(ids)
        nearby = [row + 7 for row in ids if row + 7 < table.rows and row + 7 not in set(ids)]
        assert not oracle.packed(table.layer, nearby).any(), "the rest is zeros"


def test_sparse_rows_are_those_of_the_full_table(tmp_path: Path) -> None:
    synthesise(tmp_path / "full", 50, seed=9)
    synthesise(tmp_path / "sparse", 50, seed=9, sparse=True)
    planted = json.loads((tmp_path / "sparse" / "planted.json").read_text())["layers"]["14"]
    full = RowOracle(tmp_path / "full").packed(14, planted["ids"])
    assert [row.tobytes().hex() for row in full] == planted["packed_hex"]
