"""Model facts: config.json -> `EngramSpec`.

Everything a lookup needs to know about a model with Engram tables, derived from the checkpoint's config
alone: layers, orders, heads, primes, offsets, multipliers and rows per table. Which keys exist, and how
primes and multipliers are drawn, comes from DeepSeek-V4.1's released config and reference code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEAD_DIM = 256
"""Values per row. The kernels are written for this width; V4.1 has no other."""

V41_COMPRESSED_VOCAB_SIZE = 99_092
V41_TOKEN_MAP_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
"""sha256 of V4.1's token map as little-endian int32."""

_MODEL_TYPE = "deepseek_v41"
_MULTIPLIER_SEED = 10_007
_FROZEN_MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
"""V4.1's, by layer: what the model was trained with, whatever NumPy's generator may become."""

_FOREIGN_KEY = re.compile(r"engram_(seed|kernel_size|(\w+_)?rot\w*)")
"""Keys of other Engram models; `rot` is rotation by any spelling."""
_COLUMNS_MAX = 4_096
_LAYERS_MAX = 256
_ENGRAM_VOCAB_SIZE_MAX = 2**31
"""Keeps every prime below 2^32, which the hash needs."""
_ROWS_MAX = 2**44
_CONFIG_BYTES_MAX = 16 << 20


class SpecError(ValueError):
    """A config.json that does not describe Engram tables this project can serve. The text is a sentence."""


@dataclass(frozen=True)
class EngramSpec:
    """What the Engram tables of one model look like. Immutable; every field follows from config.json.

    Column order inside a layer is `(order - 2) * heads + head`.
    """

    model_type: str
    layers: tuple[int, ...]
    max_ngram_size: int
    heads: int
    head_dim: int
    engram_vocab_size: int
    compressed_vocab_size: int
    pad_token_id: int
    image_token_id: int
    primes: tuple[tuple[int, ...], ...]
    """[layer][column]: modulus of each column's hash."""
    multipliers: tuple[tuple[int, ...], ...]
    """[layer][shift]: factor of the id at p - shift."""

    @property
    def orders(self) -> tuple[int, ...]:
        """N-gram orders, ascending: (2, 3, 4)."""
        return tuple(range(2, self.max_ngram_size + 1))

    @property
    def columns(self) -> int:
        """Rows looked up per token and layer: 24."""
        return (self.max_ngram_size - 1) * self.heads

    @property
    def rows(self) -> tuple[int, ...]:
        """[layer]: rows of each table, the sum of its primes."""
        return tuple(sum(primes) for primes in self.primes)

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """[layer][column]: first row of each column, the exclusive cumulative sum of the primes."""
        return tuple((0, *accumulate(primes[:-1])) for primes in self.primes)

    @property
    def is_v41(self) -> bool:
        """True when the compressed vocabulary is V4.1's, so its token map digest must match.

        A flat config may carry the text part's own model type, `deepseek_v41_text`.
        """
        return (
            self.model_type.startswith(_MODEL_TYPE)
            and self.compressed_vocab_size == V41_COMPRESSED_VOCAB_SIZE
        )

    def to_config(self) -> dict[str, Any]:
        """The keys of a flat config.json that `from_config` makes this spec of."""
        return {
            "model_type": self.model_type,
            "image_token_id": self.image_token_id,
            "engram_layer_ids": list(self.layers),
            "engram_num_embeddings": list(self.rows),
            "engram_max_ngram_size": self.max_ngram_size,
            "engram_vocab_size": self.engram_vocab_size,
            "engram_n_heads": self.heads,
            "engram_head_dim": self.head_dim,
            "engram_pad_token_id": self.pad_token_id,
            "engram_compressed_vocab_size": self.compressed_vocab_size,
        }

    def rows_of(self, layer: int) -> int:
        """Rows of one layer's table; KeyError for a layer without Engram."""
        return dict(zip(self.layers, self.rows, strict=True))[layer]

    def hash_digest(self, pad_class: int) -> bytes:
        """sha256 of layers, primes, multipliers, pad class and image id as little-endian int64."""
        numbers = [
            *self.layers,
            *(prime for primes in self.primes for prime in primes),
            *(factor for factors in self.multipliers for factor in factors),
            pad_class,
            self.image_token_id,
        ]
        return hashlib.sha256(np.asarray(numbers, dtype="<i8").tobytes()).digest()

    def table_digest(self, layer: int, row_bytes: int, sampled: bytes) -> bytes:
        """sha256 of u32 layer, u64 rows, u32 row bytes and the packed bytes of `digest_rows(layer)`."""
        digest = hashlib.sha256()
        digest.update(layer.to_bytes(4, "little"))
        digest.update(self.rows_of(layer).to_bytes(8, "little"))
        digest.update(row_bytes.to_bytes(4, "little"))
        digest.update(sampled)
        return digest.digest()

    def digest_rows(self, layer: int) -> NDArray[np.int64]:
        """int64[4096]: the row ids a table digest samples, floor(i * rows / 4096)."""
        rows = self.rows_of(layer)
        return np.asarray([i * rows // 4096 for i in range(4096)], dtype=np.int64)

    @classmethod
    def from_file(cls, path: Path) -> EngramSpec:
        """Read a config.json, or the one inside a checkpoint directory or beside a shard. Raises SpecError."""
        if path.is_dir():
            path = path / "config.json"
        elif path.suffix == ".safetensors":
            path = path.with_name("config.json")
        try:
            if path.stat().st_size > _CONFIG_BYTES_MAX:
                raise SpecError(f"{path} is larger than {_CONFIG_BYTES_MAX} bytes: not a config.json")
            config = json.loads(path.read_bytes())
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}") from error
        except SpecError:
            raise
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{path} is not JSON: {error}") from error
        try:
            return cls.from_config(config)
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from error

    @classmethod
    def from_config(cls, config: object) -> EngramSpec:
        """From a parsed config.json, with its keys under `text_config` or at top level. Raises SpecError."""
        if not isinstance(config, Mapping):
            raise SpecError("the config is not a JSON object")
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise SpecError("text_config is not a JSON object")
        foreign = sorted(key for part in (config, text) for key in part if _FOREIGN_KEY.fullmatch(key))
        if foreign:
            raise SpecError(
                f"the config carries {foreign[0]}, which DeepSeek-V4.1's Engram does not have: this is "
                "another model, and its rows would be wrong"
            )
        keys = _Keys(text, config)
        layers = keys.integers("engram_layer_ids", low=0, high=2**31 - 1)
        if not 1 <= len(layers) <= _LAYERS_MAX:
            raise SpecError(f"engram_layer_ids lists {len(layers)} layers; expected 1 to {_LAYERS_MAX}")
        if list(layers) != sorted(set(layers)):
            raise SpecError(f"engram_layer_ids must ascend without repeats; got {list(layers)}")
        max_ngram_size = keys.integer("engram_max_ngram_size", low=2, high=8)
        heads = keys.integer("engram_n_heads", low=1, high=64)
        head_dim = keys.integer("engram_head_dim", low=1, high=2**20)
        if head_dim != HEAD_DIM:
            raise SpecError(f"engram_head_dim is {head_dim}; only rows of {HEAD_DIM} values are supported")
        engram_vocab_size = keys.integer("engram_vocab_size", low=2, high=_ENGRAM_VOCAB_SIZE_MAX)
        compressed = keys.integer("engram_compressed_vocab_size", low=1, high=2**31 - 1)
        columns = (max_ngram_size - 1) * heads
        if columns * len(layers) > _COLUMNS_MAX:
            raise SpecError(f"{len(layers)} layers of {columns} columns are over the limit of {_COLUMNS_MAX}")

        drawn = primes_from(engram_vocab_size, columns * len(layers))
        primes = tuple(drawn[i * columns : (i + 1) * columns] for i in range(len(layers)))
        spec = cls(
            model_type=keys.text("model_type", default=_MODEL_TYPE),
            layers=layers,
            max_ngram_size=max_ngram_size,
            heads=heads,
            head_dim=head_dim,
            engram_vocab_size=engram_vocab_size,
            compressed_vocab_size=compressed,
            pad_token_id=keys.integer("engram_pad_token_id", "engram_pad_id", low=0, high=2**31 - 1),
            image_token_id=keys.integer("image_token_id", low=0, high=2**31 - 1),
            primes=primes,
            multipliers=tuple(_multipliers(layer, max_ngram_size, compressed) for layer in layers),
        )
        declared = keys.integers("engram_num_embeddings", low=1, high=_ROWS_MAX)
        if declared != spec.rows:
            raise SpecError(
                f"engram_num_embeddings is {list(declared)}, but the primes of engram_vocab_size "
                f"{engram_vocab_size} sum to {list(spec.rows)}: the config contradicts itself"
            )
        return spec


@dataclass(frozen=True)
class _Keys:
    """Typed access to the config: the text part first, then the top level."""

    text_part: Mapping[str, Any]
    top: Mapping[str, Any]

    def _find(self, *names: str) -> tuple[str, Any]:
        found = [(n, part[n]) for n in names for part in (self.text_part, self.top) if n in part]
        if not found:
            raise SpecError(f"the config has no {' or '.join(names)}: not a model with Engram tables?")
        if any(value != found[0][1] for _, value in found):
            raise SpecError(f"the config gives {' and '.join(n for n, _ in found)} different values")
        return found[0]

    def integer(self, *names: str, low: int, high: int) -> int:
        name, value = self._find(*names)
        return _checked_int(name, value, low, high)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        value = self._find(name)[1]
        items = value if isinstance(value, list) else [value]
        return tuple(_checked_int(name, item, low, high) for item in items)

    def text(self, name: str, default: str) -> str:
        # The nested part names itself otherwise ("deepseek_v41_text"); the model's name is at the top.
        value = self.top.get(name, default)
        if not isinstance(value, str):
            raise SpecError(f"{name} is not a string")
        return value


def _checked_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"{name} is {value!r}; expected an integer")
    if not low <= value <= high:
        raise SpecError(f"{name} is {value}; expected {low} to {high}")
    return value


def _multipliers(layer: int, count: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd factors small enough that no product with a class id exceeds 2^63 - 1."""
    if compressed_vocab_size == V41_COMPRESSED_VOCAB_SIZE and count == 4:
        frozen = _FROZEN_MULTIPLIERS.get(layer)
        if frozen is not None:
            return frozen
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    draws = np.random.default_rng(_MULTIPLIER_SEED * layer).integers(0, bound, size=count, dtype=np.int64)
    return tuple(int(draw) * 2 + 1 for draw in draws)


@lru_cache(maxsize=16)
def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes not below `start`, ascending.

    The reference draws them in (layer, order, head) order, restarting each order's scan at `start` and
    skipping those taken: one ascending sequence.
    """
    return tuple(islice(_ascending_primes(start), count))


def _ascending_primes(start: int) -> Iterator[int]:
    candidate = start
    while True:
        if _is_prime(candidate):
            yield candidate
        candidate += 1


def _is_prime(n: int) -> bool:
    """Miller-Rabin, exact below 3.3e24 with these bases."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if n < 2:
        return False
    for p in bases:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True
