"""What a lookup must return: the oracles of rows, hash and dequantisation put together."""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles import dequant, hashing
from oracles.facts import FACTS
from oracles.rows import RowOracle

from engram_server.spec import EngramSpec
from engram_server.tokens import find_tokenizer, load_token_map

IMAGE: int = FACTS["image_token_id"]
_DTYPES = {"packed": "u1", "packed-fp8": "u1", "bf16": "<u2", "fp32": "<f4"}


class Truth:
    """Rows of one synthetic checkpoint with layers 1 and 14, without the product."""

    def __init__(self, path: Path, kind: str) -> None:
        """kind: "fp4" or "fp8"."""
        config = json.loads((path / "config.json").read_text())
        self.path = path
        self.kind = kind
        self.oracle = RowOracle(path)
        self.layers = tuple(self.oracle.layers)
        primes = hashing.first_primes(config["text_config"]["engram_vocab_size"], 24 * len(self.layers))
        self.model = hashing.Model(
            token_map=v41_token_map(path),
            pad_class=FACTS["pad_token_id"],
            image_token_id=IMAGE,
            multipliers=[FACTS["multipliers"][str(layer)] for layer in self.layers],
            primes=[primes[24 * i : 24 * (i + 1)] for i in range(len(self.layers))],
        )

    def ids(self, tokens: Sequence[int], history: Sequence[int] = ()) -> NDArray[np.int64]:
        """Row ids [T, L, 24]."""
        rows, _ = hashing.hash_sequence(self.model, tokens, history)
        return np.asarray(rows, dtype=np.int64).reshape(len(tokens), len(self.layers), 24)

    def rows(self, layer: int, ids: object, format: str) -> NDArray[Any]:
        """Rows [..., W] of ids of any shape, as a client returns them."""
        wanted = np.asarray(ids, dtype=np.int64)
        if not wanted.size:
            return np.empty((*wanted.shape, 0), dtype=_DTYPES[format])
        packed = self.oracle.packed(layer, wanted.reshape(-1))
        converted = dequant.convert(self.kind, format.replace("-", "_"), packed)
        values = np.ascontiguousarray(converted).view(_DTYPES[format])
        return values.reshape(*wanted.shape, values.shape[-1])

    def values(self, ids: NDArray[np.int64], format: str, layers: Sequence[int] = ()) -> NDArray[Any]:
        """Rows [T, L, C, W] of ids [T, all layers, C], of the layers chosen."""
        chosen = layers or self.layers
        return np.stack(
            [self.rows(layer, ids[:, self.layers.index(layer)], format) for layer in chosen], axis=1
        )


@lru_cache
def v41_token_map(path: Path) -> list[int]:
    """V4.1's token map. The product builds it; the published digest says that it is right."""
    spec = EngramSpec.from_file(path)
    tokenizer = find_tokenizer(path, None, spec)
    assert tokenizer is not None
    classes = load_token_map(tokenizer, spec).ids
    assert hashlib.sha256(classes.astype("<i4").tobytes()).hexdigest() == FACTS["token_map_sha256_int32_le"]
    return [int(number) for number in classes]


def same(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Bit for bit, shape and dtype included: NaN equals NaN, 0.0 is not -0.0."""
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and actual.tobytes() == expected.tobytes()
    )
