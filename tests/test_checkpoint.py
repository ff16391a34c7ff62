"""Opening checkpoints: the planes of good ones, and a sentence for each bad one."""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from oracles.files import CheckpointFiles, write_shard
from oracles.rows import RowOracle

from engram_kernels._core import RowKind
from engram_server.tables import checkpoint as checkpoint_module
from engram_server.tables.checkpoint import Checkpoint, open_checkpoint
from engram_server.tables.inspect import format_report, inspect

SHARD_1, SHARD_14 = CheckpointFiles.SHARD_1, CheckpointFiles.SHARD_14
WEIGHT_1, SCALE_1 = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"
WEIGHT_14, SCALE_14 = "layers.14.engram.embed.weight", "layers.14.engram.embed.scale"


def assert_rows_are_where_the_oracle_finds_them(checkpoint: Checkpoint, root: Path) -> None:
    oracle = RowOracle(root)
    for table in checkpoint.tables:
        assert table.rows == oracle.rows(table.layer)
        assert table.row_bytes == oracle.row_bytes(table.layer)
        for row in (0, 1, table.rows // 2, table.rows - 1):
            parts = []
            for plane in (table.codes, table.scales):
                with plane.path.open("rb") as file:
                    parts.append(os.pread(file.fileno(), plane.stride, plane.offset + row * plane.stride))
            assert b"".join(parts) == oracle.packed(table.layer, row).tobytes()


@pytest.mark.parametrize(("fmt", "kind"), [("fp4", RowKind.FP4), ("fp8", RowKind.FP8)])
def test_directory(request: pytest.FixtureRequest, fmt: str, kind: RowKind) -> None:
    root: Path = request.getfixturevalue(f"{fmt}_checkpoint")
    checkpoint = open_checkpoint(root)
    assert checkpoint.root == root
    assert checkpoint.spec.layers == (1, 14)
    assert [table.layer for table in checkpoint.tables] == [1, 14]
    assert {table.kind for table in checkpoint.tables} == {kind}
    assert checkpoint.files == (root / SHARD_1, root / SHARD_14)
    assert checkpoint.scale_bytes == 8 * sum(checkpoint.spec.rows)
    assert any(table.codes.offset % 2 for table in checkpoint.tables), "unaligned data is covered"
    assert_rows_are_where_the_oracle_finds_them(checkpoint, root)


def test_one_shard_serves_its_layers(fp4_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(fp4_checkpoint / SHARD_14)
    assert [table.layer for table in checkpoint.tables] == [14]
    assert checkpoint.spec.layers == (1, 14)
    assert checkpoint.root == fp4_checkpoint
    assert_rows_are_where_the_oracle_finds_them(checkpoint, fp4_checkpoint)


def test_single_file_checkpoint(tmp_path: Path) -> None:
    files = CheckpointFiles("fp8")
    files.index = None
    files.shards = {"model.safetensors": files.shards[SHARD_1] | files.shards[SHARD_14]}
    checkpoint = open_checkpoint(files.write(tmp_path))
    assert [table.layer for table in checkpoint.tables] == [1, 14]
    assert checkpoint.files == (tmp_path / "model.safetensors",)
    assert_rows_are_where_the_oracle_finds_them(checkpoint, tmp_path)


def test_codes_and_scales_in_different_shards(tmp_path: Path) -> None:
    files = CheckpointFiles()
    assert files.index is not None
    files.shards["other.safetensors"] = {SCALE_1: files.shards[SHARD_1].pop(SCALE_1)}
    files.index["weight_map"][SCALE_1] = "other.safetensors"
    checkpoint = open_checkpoint(files.write(tmp_path))
    assert checkpoint.tables[0].scales.path.name == "other.safetensors"
    assert len(checkpoint.files) == 3
    assert_rows_are_where_the_oracle_finds_them(checkpoint, tmp_path)


def test_symlinks_as_the_hugging_face_cache_lays_them(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    CheckpointFiles().write(blobs)
    for number, blob in enumerate(sorted(blobs.iterdir())):
        hashed = blob.rename(blobs / f"{number:064x}")
        (snapshot / blob.name).symlink_to(f"../../blobs/{hashed.name}")
    assert_rows_are_where_the_oracle_finds_them(open_checkpoint(snapshot), snapshot)


def test_shards_without_tables_need_not_be_there(tmp_path: Path) -> None:
    root = CheckpointFiles().write(tmp_path)
    assert "model-00001-of-00048.safetensors" in (root / "model.safetensors.index.json").read_text()
    assert len(open_checkpoint(root).tables) == 2


@pytest.mark.parametrize(
    "hints",
    [
        None,
        {},
        {"engram_dtype": None},
        {"engram_dtype": "fp4", "engram_block_size": 32, "engram_scale_fmt": "ue8m0"},
        {"engram_dtype": "MXFP4"},
    ],
)
def test_hints_that_agree_or_say_nothing(tmp_path: Path, hints: object) -> None:
    files = CheckpointFiles("fp4")
    files.config["quantization_config"] = hints
    assert open_checkpoint(files.write(tmp_path)).tables[0].kind is RowKind.FP4


# ------------------------------------------------------------------------------------- malformed

Bend = Callable[[CheckpointFiles], None]
"""Bends a checkpoint before it is written."""
Break = Callable[[Path], None]
"""Breaks the directory after it is written."""


def index_says(tensor: str, file: object) -> Bend:
    def bend(files: CheckpointFiles) -> None:
        assert files.index is not None
        files.index["weight_map"][tensor] = file

    return bend


def index_drops(*tensors: str) -> Bend:
    def bend(files: CheckpointFiles) -> None:
        assert files.index is not None
        for tensor in tensors:
            del files.index["weight_map"][tensor]

    return bend


def shard_has(tensor: str, dtype: str, shape: list[int]) -> Bend:
    return lambda files: files.shards[SHARD_1].update({tensor: (dtype, shape)})


def hint(key: str, value: object) -> Bend:
    return lambda files: files.hints.update({key: value})


def text(name: str, value: object) -> Bend:
    return lambda files: files.config["text_config"].update({name: value})


BENT: dict[str, tuple[Bend, str]] = {
    "index without weight_map": (
        lambda files: setattr(files, "index", {"metadata": {}}),
        r"index\.json has no weight_map object; download it again",
    ),
    "weight_map is a list": (
        lambda files: setattr(files, "index", {"weight_map": []}),
        "has no weight_map object",
    ),
    "no index": (
        lambda files: setattr(files, "index", None),
        r"has neither model\.safetensors\.index\.json nor model\.safetensors; name",
    ),
    "shard name leads out": (
        index_says(WEIGHT_1, "../x.safetensors"),
        r"'\.\./x\.safetensors', which is not the name",
    ),
    "shard name is absolute": (
        index_says(WEIGHT_1, "/etc/passwd"),
        "'/etc/passwd', which is not the name of a file",
    ),
    "shard name is the parent": (index_says(WEIGHT_1, ".."), r"'\.\.', which is not the name of a file"),
    "shard name is empty": (index_says(WEIGHT_1, ""), "'', which is not the name of a file beside it"),
    "shard name has a NUL": (index_says(WEIGHT_1, "a\0b"), "which is not the name of a file beside it"),
    "shard name is a number": (index_says(WEIGHT_1, 47), "is in 47, which is not the name of a file"),
    "shard name is too long": (
        index_says(WEIGHT_1, "x" * 300),
        "lists the shard 'xxx.*is not there; download",
    ),
    "shard name is half a surrogate": (index_says(WEIGHT_1, "\ud800"), "which is not there"),
    "shard absent": (
        index_says(WEIGHT_1, "model-00046-of-00048.safetensors"),
        r"index\.json lists the shard 'model-00046-of-00048\.safetensors', which is not there; download it",
    ),
    "shard lacks the tensor": (
        index_says(WEIGHT_1, SHARD_14),
        f"says {SHARD_14} holds '{WEIGHT_1}', but that shard has no such tensor; download both",
    ),
    "weight without scale": (index_drops(SCALE_1), f"lists '{WEIGHT_1}' without '{SCALE_1}'"),
    "scale without weight": (index_drops(WEIGHT_14), f"lists '{SCALE_14}' without '{WEIGHT_14}'"),
    "layer missing": (
        index_drops(WEIGHT_14, SCALE_14),
        f"lists no '{WEIGHT_14}', but engram_layer_ids of .* names layer 14",
    ),
    "layer unknown to the config": (
        index_says("layers.7.engram.embed.weight", SHARD_1),
        r"Engram table of layer 7, but engram_layer_ids of .* is \[1, 14\]",
    ),
    "names with a prefix": (
        lambda files: setattr(
            files, "index", {"weight_map": {"model." + name: SHARD_1 for name in files.shards[SHARD_1]}}
        ),
        f"lists no '{WEIGHT_1}'",
    ),
    "codes are BF16": (
        shard_has(WEIGHT_1, "BF16", [11, 256]),
        rf"'{WEIGHT_1}' is BF16\[11, 256\]; a table is FP4 as U8\[rows, 128\] or FP8 as F8_E4M3\[rows, 256\]",
    ),
    "FP4 dtype with FP8 width": (shard_has(WEIGHT_1, "U8", [11, 256]), r"is U8\[11, 256\]; a table is"),
    "FP8 dtype with FP4 width": (
        shard_has(WEIGHT_1, "F8_E4M3", [11, 128]),
        r"is F8_E4M3\[11, 128\]; a table is",
    ),
    "codes are flat": (shard_has(WEIGHT_1, "U8", [11 * 128]), r"is U8\[1408\]; a table is"),
    "codes have no dimension": (shard_has(WEIGHT_1, "U8", []), r"is U8\[\]; a table is"),
    "codes have three dimensions": (shard_has(WEIGHT_1, "U8", [11, 128, 1]), r"is U8\[11, 128, 1\]; a table"),
    "scales are U8": (
        shard_has(SCALE_1, "U8", [11, 8]),
        rf"'{SCALE_1}' is U8\[11, 8\], but its 11 rows of codes need F8_E8M0\[11, 8\]",
    ),
    "scales are 4 wide": (shard_has(SCALE_1, "F8_E8M0", [11, 4]), r"F8_E8M0\[11, 4\], but its 11 rows"),
    "fewer scales than rows": (shard_has(SCALE_1, "F8_E8M0", [10, 8]), r"F8_E8M0\[10, 8\], but its 11 rows"),
    "rows contradict the config": (
        lambda files: files.shards[SHARD_1].update(
            {WEIGHT_1: ("U8", [12, 128]), SCALE_1: ("F8_E8M0", [12, 8])}
        ),
        rf"'{WEIGHT_1}' has 12 rows, but .*config\.json gives layer 1 11; use the config",
    ),
    "one table FP4, the other FP8": (
        shard_has(WEIGHT_1, "F8_E4M3", [11, 256]),
        "layer 1's table is FP8, layer 14's FP4; all tables of a checkpoint must have one format",
    ),
    "hint of another format": (
        hint("engram_dtype", "fp8"),
        rf"says engram_dtype is 'fp8', but '{WEIGHT_1}' in {SHARD_1} is FP4 .*correct the config",
    ),
    "hint of an unknown format": (hint("engram_dtype", "nvfp4"), "engram_dtype is 'nvfp4', but .* is FP4"),
    "hint is a list": (hint("engram_dtype", ["fp4"]), r"engram_dtype is \['fp4'\], but"),
    "hint of another block": (hint("engram_block_size", 16), r"engram_block_size is 16, but .*per 32 values"),
    "hint of another scale": (
        hint("engram_scale_fmt", "e4m3"),
        "engram_scale_fmt is 'e4m3', but .*E8M0 scale",
    ),
    "quantization_config is text": (
        lambda files: files.config.update(quantization_config="fp8"),
        "quantization_config is not an object; correct or remove it",
    ),
    "config contradicts itself": (
        text("engram_num_embeddings", [11, 17]),
        r"config\.json: engram_num_embeddings is \[11, 17\], but the primes .* sum to \[11, 13\]",
    ),
    "config of another model": (
        text("engram_kernel_size", 4),
        r"config\.json: .*engram_kernel_size.*another model",
    ),
}


@pytest.mark.parametrize(("bend", "words"), BENT.values(), ids=BENT)
def test_bent_checkpoint_gets_its_sentence(tmp_path: Path, bend: Bend, words: str) -> None:
    files = CheckpointFiles()
    bend(files)
    assert_refused(files.write(tmp_path), words)


def cut(name: str, keep: int) -> Break:
    def damage(root: Path) -> None:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[:keep] if keep >= 0 else content[: len(content) + keep])

    return damage


def put(name: str, content: bytes) -> Break:
    return lambda root: (root / name).write_bytes(content) and None


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 52000000000\n"

BROKEN: dict[str, tuple[Break, str]] = {
    "index empty": (put("model.safetensors.index.json", b""), "the index is not JSON"),
    "index cut": (cut("model.safetensors.index.json", 100), "the index is not JSON"),
    "index is a list": (put("model.safetensors.index.json", b"[]"), "the index is JSON, but not an object"),
    "index not UTF-8": (put("model.safetensors.index.json", b'{"\xfe": 1}'), "the index is not UTF-8"),
    "index names a tensor twice": (
        put("model.safetensors.index.json", b'{"weight_map": {"a": "b", "a": "c"}}'),
        "the index has the key 'a' twice",
    ),
    "index is a directory": (
        lambda root: (
            (root / "model.safetensors.index.json").rename(root / "old")
            and (root / "model.safetensors.index.json").mkdir()
        ),
        "index.json cannot be read: Is a directory",
    ),
    "config absent": (
        lambda root: (root / "config.json").unlink(),
        r"has no config\.json, .*download it too",
    ),
    "config not JSON": (put("config.json", b"{"), r"config\.json is not JSON"),
    "shard an LFS pointer": (put(SHARD_1, LFS), f"{SHARD_1}: this is a Git LFS pointer.*git lfs pull"),
    "shard empty": (put(SHARD_14, b""), f"{SHARD_14}: the file is empty"),
    "shard cut in the header": (cut(SHARD_1, 40), f"{SHARD_1}: the header has .* truncated"),
    "shard cut in the data": (cut(SHARD_14, -1), f"{SHARD_14}: .* it is truncated; resume or repeat"),
    "shard a broken symlink": (
        lambda root: (root / SHARD_1).rename(root / "moved") and (root / SHARD_1).symlink_to("nowhere"),
        f"lists the shard '{SHARD_1}', which is not there",
    ),
    "shard a directory": (
        lambda root: (root / SHARD_1).rename(root / "moved") and (root / SHARD_1).mkdir(),
        f"{SHARD_1}: this is not a regular file",
    ),
}


@pytest.mark.parametrize(("damage", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_checkpoint_gets_its_sentence(tmp_path: Path, damage: Break, words: str) -> None:
    root = CheckpointFiles().write(tmp_path)
    damage(root)
    assert_refused(root, words)


def assert_refused(path: Path, words: str) -> None:
    """Refused with these words, and `inspect` tells the same."""
    with pytest.raises(ValueError, match=words) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)
    assert "Traceback" not in str(error.value)
    report = inspect(path)
    assert str(error.value) in report["problems"]
    assert "cannot be served" in format_report(report)
    json.dumps(report)


def test_index_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "INDEX_BYTES_MAX", 100)
    assert_refused(CheckpointFiles().write(tmp_path), "the limit is 100: not an index")


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    root = CheckpointFiles().write(tmp_path)
    assert_refused(root / "absent", "there is no such file")
    assert_refused(root / "config.json", "is not a table file; name the directory it is in")
    write_shard(root / "backbone.safetensors", {"layers.0.attn.wq.weight": ("BF16", [2, 2])})
    assert_refused(root / "backbone.safetensors", "holds no Engram table; name the shard that does")


def test_shard_whose_scales_are_elsewhere(tmp_path: Path) -> None:
    files = CheckpointFiles()
    files.shards["other.safetensors"] = {SCALE_1: files.shards[SHARD_1].pop(SCALE_1)}
    root = files.write(tmp_path)
    assert_refused(root / SHARD_1, f"lists '{WEIGHT_1}' without '{SCALE_1}'; open the checkpoint directory")


@pytest.mark.parametrize("fmt", ["fp4", "fp8"])
def test_inspect_a_sound_checkpoint(request: pytest.FixtureRequest, fmt: str) -> None:
    root: Path = request.getfixturevalue(f"{fmt}_checkpoint")
    report = inspect(root)
    assert report["problems"] == report["notes"] == []
    assert len(report["backbone_tensors"]) == 8
    oracle = RowOracle(root)
    for table in report["tables"]:
        layer, rows, row_bytes = table["layer"], table["rows"], table["row_bytes"]
        assert (rows, row_bytes) == (oracle.rows(layer), oracle.row_bytes(layer))
        assert table["codes"]["offset_mod_512"] == table["codes"]["offset"] % 512
        sampled = oracle.packed(layer, [i * rows // 4096 for i in range(4096)])
        head = struct.pack("<IQI", layer, rows, row_bytes)
        assert table["digest"] == hashlib.sha256(head + sampled.tobytes()).hexdigest()
        assert table["digest"] in format_report(report)
    assert "can be served" in format_report(report)
    json.dumps(report)


def test_inspect_goes_on_after_a_problem(tmp_path: Path) -> None:
    root = CheckpointFiles().write(tmp_path)
    (root / SHARD_1).write_bytes(LFS)
    report = inspect(root)
    assert len(report["problems"]) == 1, "one broken shard, one problem"
    assert [table["layer"] for table in report["tables"]] == [14]
    assert [shard["name"] for shard in report["shards"]] == [SHARD_14]
    assert "engram.q_weight" in report["notes"][0]
