"""Row ids of one token sequence, for people and scripts: what `engram-server hash` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_server.spec import EngramSpec


class HashDocument(TypedDict):
    """JSON of `engram-server hash --json`."""

    layers: dict[str, list[list[int]]]
    """Layer id -> [tokens][columns] row ids."""
    mask: list[bool]
    """[tokens]: true at image positions."""


def hash_document(
    spec: EngramSpec, ngram_hash: _core.NgramHash, tokens: Sequence[int], history: Sequence[int] = ()
) -> HashDocument:
    """Hash one sequence.

    history: ids before tokens[0], oldest first; fewer than N - 1 = the sequence starts there; -1 = unknown.
    Raises ValueError naming position and id.
    """
    rows, mask = ngram_hash.rows(
        tokens=_int32("position", 0, tokens),
        lengths=np.asarray([len(tokens)], dtype=np.int64),
        history=_int32("history position", -len(history), history),
        history_lengths=np.asarray([len(history)], dtype=np.int64),
    )
    return {
        "layers": {str(layer): rows[:, i].tolist() for i, layer in enumerate(spec.layers)},
        "mask": mask.tolist(),
    }


def _int32(what: str, first: int, ids: Sequence[int]) -> NDArray[np.int32]:
    for position, token_id in enumerate(ids, start=first):
        if not -(2**31) <= token_id < 2**31:
            raise ValueError(f"{what} {position}: token id {token_id} does not fit in 32 bits")
    return np.asarray(ids, dtype=np.int32)
