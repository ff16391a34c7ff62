"""Opening a checkpoint's own files: which bytes of which shard are the rows of each Engram table.

Nothing is scanned or copied. The config, the index and the headers of the shards that hold tables are read, a
few milliseconds at any table size; other shards need not even be there. Dtype and shape decide what a table
is. `engram_*` keys of `quantization_config` are hints that no loader defines: they decide nothing, and
contradict the tensors at the price of a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engram_kernels._core import RowKind
from engram_server.spec import EngramSpec
from engram_server.tables.errors import TableError
from engram_server.tables.layout import (
    BLOCK_VALUES,
    CODES,
    CONFIG_NAME,
    ENGRAM_TENSOR,
    INDEX_NAME,
    SCALE_DTYPE,
    SCALES_PER_ROW,
    SINGLE_NAME,
    scale_name,
    weight_name,
)
from engram_server.tables.safetensors import Header, TensorInfo, parse_json_object, read_header

__all__ = ["Checkpoint", "PlaneRef", "TableError", "TableRef", "open_checkpoint"]

INDEX_BYTES_MAX = 100_000_000

_KINDS = {"fp4": RowKind.FP4, "fp8": RowKind.FP8}
_HINT_SPELLINGS = {
    RowKind.FP4: ("fp4", "mxfp4", "e2m1", "float4_e2m1fn_x2"),
    RowKind.FP8: ("fp8", "mxfp8", "e4m3", "float8_e4m3fn"),
}


@dataclass(frozen=True)
class PlaneRef:
    """One part of every row: row r is the `stride` bytes at `offset + r * stride` of `path`."""

    path: Path
    offset: int
    stride: int


@dataclass(frozen=True)
class TableRef:
    """Where one layer's table lies."""

    layer: int
    rows: int
    kind: RowKind
    codes: PlaneRef
    scales: PlaneRef

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row: 136 for FP4, 264 for FP8."""
        return self.codes.stride + self.scales.stride

    @property
    def scale_bytes(self) -> int:
        """Bytes of the whole scale plane."""
        return self.rows * self.scales.stride


@dataclass(frozen=True)
class Checkpoint:
    """The tables of a checkpoint directory, or of one of its shards."""

    root: Path
    """The directory of config.json."""
    spec: EngramSpec
    tables: tuple[TableRef, ...]
    """Ascending by layer, one row kind for all. Fewer than `spec.layers` when one shard was opened."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds rows, once each."""
        return tuple(dict.fromkeys(plane.path for t in self.tables for plane in (t.codes, t.scales)))

    @property
    def scale_bytes(self) -> int:
        """Bytes of all scale planes: what `memory` scales take."""
        return sum(table.scale_bytes for table in self.tables)


def open_checkpoint(path: Path) -> Checkpoint:
    """Find the tables of a checkpoint directory, or those of one shard with config.json beside it.

    Raises TableError or SpecError (both ValueError): a sentence naming the file, what is wrong, what to do.
    """
    source = locate(path)
    spec = EngramSpec.from_file(source.config)
    tables = tuple(read_table(source, spec, layer) for layer in served_layers(source, spec))
    check_hints(source.config, tables)
    return Checkpoint(source.root, spec, tables)


# The steps of open_checkpoint, apart because `inspect` goes on where one of them fails.


@dataclass(frozen=True)
class Source:
    """A checkpoint's files, before their tensors are looked at."""

    root: Path
    config: Path
    listing: Path
    """What says which tensors there are: the index, or the one safetensors file."""
    engram_tensors: Mapping[str, Path]
    """Name of every Engram tensor listed -> the file that should hold it."""
    whole: bool
    """False when one shard of many was named: then only its layers are served."""
    _headers: dict[Path, Header] = field(default_factory=dict)

    def header(self, shard: Path) -> Header:
        """The shard's header, read once. Raises TableError."""
        if shard not in self._headers:
            if not _exists(shard):
                raise TableError(
                    f"{self.listing} lists the shard {shard.name!r:.80}, which is not there; download it"
                )
            self._headers[shard] = read_header(shard)
        return self._headers[shard]

    def tensor(self, name: str) -> TensorInfo:
        """One of `engram_tensors`. Raises TableError."""
        shard = self.engram_tensors[name]
        tensor = self.header(shard).tensors.get(name)
        if tensor is None:
            raise TableError(
                f"{self.listing} says {shard.name} holds {name!r}, but that shard has no such tensor; "
                "download both again"
            )
        return tensor


def locate(path: Path) -> Source:
    """Find config, index and shards. Raises TableError."""
    if path.is_dir():
        if (path / INDEX_NAME).exists():
            return _locate_indexed(path, path / INDEX_NAME)
        if (path / SINGLE_NAME).exists():
            return _locate_file(path / SINGLE_NAME, whole=True)
        raise TableError(
            f"{path} has neither {INDEX_NAME} nor {SINGLE_NAME}; name a checkpoint directory, or one shard"
        )
    if path.suffix == ".json":
        raise TableError(f"{path} is not a table file; name the directory it is in")
    return _locate_file(path, whole=False)


def served_layers(source: Source, spec: EngramSpec) -> tuple[int, ...]:
    """Layers to serve, ascending. Raises TableError when the files hold a table the config does not know."""
    found = set()
    for name in source.engram_tensors:
        match = ENGRAM_TENSOR.fullmatch(name)
        if match and match[2] in ("embed.weight", "embed.scale"):
            found.add(int(match[1]))
    unknown = sorted(found - set(spec.layers))
    if unknown:
        raise TableError(
            f"{source.listing} lists an Engram table of layer {unknown[0]}, but engram_layer_ids of "
            f"{source.config} is {list(spec.layers)}; use the config that belongs to these tables"
        )
    if source.whole:
        return spec.layers
    if not found:
        raise TableError(
            f"{source.listing} holds no Engram table; name the shard that does, or the checkpoint directory"
        )
    return tuple(sorted(found))


def read_table(source: Source, spec: EngramSpec, layer: int) -> TableRef:
    """Locate one layer's planes and check them against the config. Raises TableError."""
    names = (weight_name(layer), scale_name(layer))
    missing = [name for name in names if name not in source.engram_tensors]
    if len(missing) == 2:
        raise TableError(
            f"{source.listing} lists no {names[0]!r}, but engram_layer_ids of {source.config} names layer "
            f"{layer}; use a checkpoint that has the table"
        )
    if missing:
        present = names[0] if missing[0] == names[1] else names[1]
        advice = "download it again" if source.whole else "open the checkpoint directory instead"
        raise TableError(f"{source.listing} lists {present!r} without {missing[0]!r}; {advice}")
    weight, scale = (source.tensor(name) for name in names)
    kind = _kind(source.engram_tensors[weight.name], weight)
    rows = weight.shape[0]
    if (scale.dtype, scale.shape) != (SCALE_DTYPE, (rows, SCALES_PER_ROW)):
        raise TableError(
            f"{source.engram_tensors[scale.name]}: {_describe(scale)}, but its {rows} rows of codes need "
            f"{SCALE_DTYPE}[{rows}, {SCALES_PER_ROW}]; convert the checkpoint again"
        )
    if rows != spec.rows_of(layer):
        raise TableError(
            f"{source.engram_tensors[weight.name]}: {weight.name!r} has {rows} rows, but {source.config} "
            f"gives layer {layer} {spec.rows_of(layer)}; use the config that belongs to these tables"
        )
    codes, scales = (
        PlaneRef(source.engram_tensors[tensor.name], tensor.begin, tensor.shape[1])
        for tensor in (weight, scale)
    )
    return TableRef(layer, rows, kind, codes, scales)


def quantization_hints(config: Path) -> Mapping[str, object]:
    """`quantization_config` of a config.json that EngramSpec accepts, or {}. Raises TableError."""
    keys = json.loads(config.read_bytes())
    text = keys.get("text_config", {})
    hints = keys.get("quantization_config") or text.get("quantization_config") or {}
    if not isinstance(hints, Mapping):
        raise TableError(f"{config}: quantization_config is not an object; correct or remove it")
    return hints


def check_hints(config: Path, tables: Sequence[TableRef]) -> None:
    """Refuse tables of different formats, and a config that says another format than they have."""
    hints = quantization_hints(config)
    for table in tables:
        first = tables[0]
        if table.kind is not first.kind:
            raise TableError(
                f"{config.parent}: layer {first.layer}'s table is {first.kind.name}, layer {table.layer}'s "
                f"{table.kind.name}; all tables of a checkpoint must have one format: convert one of them"
            )
        expected = {
            "engram_dtype": _HINT_SPELLINGS[table.kind],
            "engram_block_size": (BLOCK_VALUES,),
            "engram_scale_fmt": ("ue8m0", "e8m0"),
        }
        for key, spellings in expected.items():
            value = hints.get(key)
            if value is None:
                continue
            if (value.lower() if isinstance(value, str) else value) not in spellings:
                raise TableError(
                    f"{config} says {key} is {value!r:.80}, but {weight_name(table.layer)!r} in "
                    f"{table.codes.path.name} is {table.kind.name} with one E8M0 scale per {BLOCK_VALUES} "
                    f"values ({key} {spellings[0]!r}); correct the config, or use the tables it describes"
                )


def _locate_indexed(root: Path, index: Path) -> Source:
    try:
        size = index.stat().st_size
        if size > INDEX_BYTES_MAX:
            raise TableError(f"{index} has {size} bytes; the limit is {INDEX_BYTES_MAX}: not an index")
        listed = parse_json_object(index, "the index", index.read_bytes()).get("weight_map")
    except OSError as error:
        raise TableError(f"{index} cannot be read: {error.strerror}; check its permissions") from error
    if not isinstance(listed, dict):
        raise TableError(f"{index} has no weight_map object; download it again")
    shards = {
        name: _shard_path(index, name, file) for name, file in listed.items() if ENGRAM_TENSOR.fullmatch(name)
    }
    return Source(root, _config_of(root), index, shards, whole=True)


def _shard_path(index: Path, tensor: str, file: object) -> Path:
    # A name from the network must not lead out of the directory. Symlinks that the user made may.
    if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
        raise TableError(
            f"{index} says {tensor!r} is in {file!r:.80}, which is not the name of a file beside it; "
            "download the index again"
        )
    return index.parent / file


def _locate_file(path: Path, whole: bool) -> Source:
    header = read_header(path)
    names = {name: path for name in header.tensors if ENGRAM_TENSOR.fullmatch(name)}
    return Source(path.parent, _config_of(path.parent), path, names, whole, {path: header})


def _config_of(root: Path) -> Path:
    config = root / CONFIG_NAME
    if not config.exists():
        raise TableError(f"{root} has no {CONFIG_NAME}, which says what the tables are; download it too")
    return config


def _kind(shard: Path, weight: TensorInfo) -> RowKind:
    for fmt, (dtype, width) in CODES.items():
        if weight.dtype == dtype and len(weight.shape) == 2 and weight.shape[1] == width:
            return _KINDS[fmt]
    known = " or ".join(f"{fmt.upper()} as {dtype}[rows, {width}]" for fmt, (dtype, width) in CODES.items())
    raise TableError(f"{shard}: {_describe(weight)}; a table is {known}: convert the checkpoint again")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name no file system takes
        return False


def _describe(tensor: TensorInfo) -> str:
    return f"{tensor.name!r} is {tensor.dtype}{list(tensor.shape)}"
