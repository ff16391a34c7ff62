"""Rows for SGLang's full CUDA graphs of decode and verify steps: written to fixed places before each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a graph finds the rows of one layer, and which rows these are."""

    embedding: Any
    ids: Tensor
    """int64 [T, columns]"""
    rows: Tensor
    """bfloat16 [T, columns, 256]"""


@dataclass
class _Step:
    """What a graph has captured: its ForwardBatch, whose tensors are filled anew before each replay."""

    batch: Any = None
    places: list[Place] = field(default_factory=list)


class FullGraphs:
    """The full graphs of a process, and the places they share.

    A graph hashes by itself, and moves the history of its requests on. Its ids are computed before, by SGLang's own
    hash in torch, which moves nothing. The graph compares them with its own: a row that is not the one it wants becomes
    NaN, and the step after fails.
    """

    def __init__(self, decode: int, verify: int) -> None:
        """Modes of SGLang's hash: MODE_DECODE and MODE_VERIFY."""
        self._modes = {False: decode, True: verify}
        self.hasher: Any = None
        """SGLang's EngramHasher, from when the model has been loaded."""
        self._batch: Any = None
        self._capturing: _Step | None = None
        self._places: dict[int, Place] = {}
        self._differed: Tensor | None = None

    @contextmanager
    def lookups_of(self, batch: Any) -> Iterator[None]:
        """While it is open, lookups are for this ForwardBatch."""
        before, self._batch = self._batch, batch
        try:
            yield
        finally:
            self._batch = before

    def warm_up(self, embedding: Any, ids: Tensor) -> None:
        """Before a graph is captured the same is run without: the time to allocate outside of the graphs' memory."""
        if self._capturing is None:
            return
        if self._differed is None:
            self._differed = torch.zeros((), dtype=torch.bool, device=ids.device)
        known = self._places.get(embedding.layer_id)
        if known is None or len(known.ids) < len(ids):  # SGLang begins with the largest
            rows = embedding.new_rows(ids).zero_()
            self._places[embedding.layer_id] = Place(embedding, torch.zeros_like(ids), rows)

    def capture(self, embedding: Any, ids: Tensor, out: Tensor) -> None:
        """Have the graph that is captured now take the rows that will have been staged. Raises RuntimeError where
        nothing stages them: in a graph of prefills, or one that is not a full graph of SGLang's."""
        step, batch, place = self._capturing, self._batch, self._places.get(embedding.layer_id)
        if step is None or place is None or self._differed is None or not _is_staged(batch):
            raise RuntimeError(
                "a CUDA graph is capturing an Engram lookup, whose rows come from a server and would be frozen: start "
                "SGLang with --cuda-graph-backend-prefill breakable (or disabled)"
            )
        place = Place(embedding, place.ids[: len(ids)], place.rows[: len(ids)])
        step.batch = batch
        step.places.append(place)
        # Rows without a place in the cache are padding, of slots whose history others may be moving on.
        differs = (ids != place.ids).any(dim=1) & (batch.out_cache_loc != 0)
        self._differed.logical_or_(differs.any())
        out.copy_(place.rows)
        out.masked_fill_(differs[:, None, None], float("nan"))

    def capture_one(
        self, plain: Callable[..., Any], backend: Any, shape: Any, *args: Any, **named: Any
    ) -> Any:
        """Around `FullCudaGraphBackend.capture_one`."""
        self._capturing = step = _Step()
        try:
            plain(backend, shape, *args, **named)
        finally:
            self._capturing = None
        vars(backend).setdefault("engram_steps", {})[shape] = step

    def replay(self, plain: Callable[..., Any], backend: Any, shape: Any, *args: Any, **named: Any) -> Any:
        """Around `FullCudaGraphBackend.replay`. Raises `EngramError`, and then replays nothing."""
        step = vars(backend).get("engram_steps", {}).get(shape)
        if step is not None and step.places:
            self._stage(step)
        return plain(backend, shape, *args, **named)

    def _stage(self, step: _Step) -> None:
        if self._differed:
            raise RuntimeError(
                "a CUDA graph has looked up other Engram rows than were staged for it: start SGLang with "
                "--cuda-graph-backend-decode breakable (or disabled), and report this"
            )
        batch, verify = step.batch, step.batch.forward_mode.is_target_verify()
        hashes, _ = self.hasher._torch_hash_ids(
            batch.input_ids,
            batch.positions,
            self._modes[verify],
            self.hasher.history[batch.req_pool_indices],
            len(batch.input_ids),
            int(batch.spec_info.draft_token_num) if verify else 1,
            None,
            None,
        )
        for embedding, ids, rows in step.places:
            ids.fill_(-1)  # nobody's, should there be no rows
            wanted = hashes[:, embedding.hash_index]
            embedding.fetch(wanted, rows)
            ids.copy_(wanted)


def capturing(tensor: Tensor) -> bool:
    """Whether what is done with it goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_staged(batch: Any) -> bool:
    return batch is not None and (batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify())
