"""The served model's hash on this side: row ids of what is asked for, proven by the server's digests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_client import Description
from engram_client._query import BlockKeys, RowKeys, TokenKeys
from engram_load._errors import LoadError
from engram_load._patterns import Request
from engram_server.spec import EngramSpec, primes_from
from engram_server.tokens import load_token_map, ngram_hash


def spec_of(description: Description) -> EngramSpec:
    """The spec of a model that a server describes. Raises SpecError."""
    model = description.model
    columns = model.columns
    primes = primes_from(model.engram_vocab_size, columns * len(model.layers))
    return EngramSpec.from_config(
        {
            "model_type": model.model_type,
            "image_token_id": model.image_token_id,
            "engram_layer_ids": list(model.layers),
            "engram_num_embeddings": [
                sum(primes[i * columns : (i + 1) * columns]) for i in range(len(model.layers))
            ],
            "engram_max_ngram_size": model.max_ngram_size,
            "engram_vocab_size": model.engram_vocab_size,
            "engram_n_heads": model.heads,
            "engram_head_dim": model.head_dim,
            "engram_pad_token_id": model.pad_token_id,
            "engram_compressed_vocab_size": model.compressed_vocab_size,
        }
    )


class RowIds:
    """Row ids of requests."""

    def __init__(self, description: Description, tokenizer: Path | None) -> None:
        """Without a tokenizer only of requests that name rows. Raises LoadError when it is not the server's."""
        self._served = tuple(description.tables)
        self._planes = {layer: plane for plane, layer in enumerate(description.model.layers)}
        self._hash = None
        if tokenizer is not None and description.hash_digest:
            spec = spec_of(description)
            token_map = load_token_map(tokenizer, spec)
            digest = spec.hash_digest(token_map.class_of(spec.pad_token_id))
            if (token_map.sha256, digest) != (description.token_map_digest, description.hash_digest):
                raise LoadError(
                    f"{tokenizer} hashes otherwise than the server does: give the model's own with --tokenizer FILE"
                )
            self._hash = ngram_hash(spec, token_map)

    def of(self, request: Request) -> list[tuple[int, NDArray[np.int64]]] | None:
        """(layer, ids int64[T, wanted columns]) of a request; None for tokens without a hash. -1 is no row."""
        found = self.whole(request)
        if found is None or request.columns is None:
            return found
        return [(layer, ids[:, slice(*request.columns)]) for layer, ids in found]

    def whole(self, request: Request) -> list[tuple[int, NDArray[np.int64]]] | None:
        """The same with all columns, whichever are wanted; those of a list of row ids are one."""
        match request.keys:
            case RowKeys(layer, ids):
                return [(layer, ids.astype(np.int64).reshape(-1, 1))]
            case BlockKeys(layers):
                return [(layer, ids.astype(np.int64)) for layer, ids in layers.items()]
            case TokenKeys(sequences):
                if self._hash is None:
                    return None
                rows, _ = self._hash.rows(
                    tokens=_joined([tokens for tokens, _ in sequences]),
                    lengths=np.asarray([len(tokens) for tokens, _ in sequences], dtype=np.int64),
                    history=_joined([history for _, history in sequences]),
                    history_lengths=np.asarray([len(history) for _, history in sequences], dtype=np.int64),
                )
                return [(layer, rows[:, self._planes[layer]]) for layer in request.layers or self._served]


class DistinctRows:
    """Counts rows asked for, and how many different ones: a bit for each row of each table."""

    def __init__(self, description: Description) -> None:
        # Zero pages that no row touches are never made.
        self._bits = {
            layer: np.zeros(-(-table.rows // 8), dtype=np.uint8)
            for layer, table in description.tables.items()
        }
        self.rows = 0
        """Those of id -1, which are none, left out."""

    def add(self, layer: int, ids: NDArray[np.int64]) -> None:
        """Rows of one layer, of any shape."""
        real = ids[ids >= 0]
        self.rows += real.size
        distinct = np.unique(real)
        np.bitwise_or.at(self._bits[layer], distinct >> 3, (1 << (distinct & 7)).astype(np.uint8))

    @property
    def distinct(self) -> int:
        """Different rows so far."""
        return sum(int.from_bytes(bits.tobytes()).bit_count() for bits in self._bits.values())


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, dtype=np.int32)
