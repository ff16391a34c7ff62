"""Random work of an engine: chunked prefills, decodes, drafts that are rejected, preemption, slots used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from support.truth import IMAGE

Kind = Literal["extend", "decode", "verify"]

DRAFTS = 3
_LENGTH = 80
_CHUNK_MAX = 12
_IDS = [0, 3, 5, 17, 29, 4051, 64000, 128000]
"""Few, so that n-grams come again."""


@dataclass
class Work:
    """What a step computes of one request."""

    kind: Kind
    slot: int
    before: list[int]
    """All ids before these, from the sequence's first."""
    tokens: list[int]
    right: int = 0
    """Of a verify: drafts behind the first token that are what the model says."""

    @property
    def begin(self) -> int:
        return len(self.before)


class _Request:
    def __init__(self, rng: np.random.Generator, slot: int) -> None:
        """Its ids are known in advance: the prompt's, and those that the model will say."""
        self.slot = slot
        self.computed = 0
        self.prompt = int(rng.integers(2, _LENGTH // 2))
        self.ids = [int(i) for i in rng.choice(_IDS, _LENGTH)]
        if rng.random() < 0.5:
            begin = int(rng.integers(self.prompt))
            end = min(self.prompt, begin + int(rng.integers(1, 5)))
            self.ids[begin:end] = [IMAGE] * (end - begin)

    @property
    def kind(self) -> Kind:
        return "extend" if self.computed < self.prompt else "decode"


class Schedule:
    """Steps of some requests that share `slots` slots."""

    def __init__(self, seed: int, slots: int, requests: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._free = list(range(slots))
        self._requests = [_Request(self._rng, self._slot()) for _ in range(requests)]

    def step(self, *, mixed: bool) -> list[Work]:
        """mixed: prefills beside decodes and verifies; else of one kind."""
        rng = self._rng
        for index, request in enumerate(self._requests):
            if request.computed + 1 + DRAFTS >= _LENGTH or rng.random() < 0.02:
                self._requests[index] = _Request(rng, self._moved(request))  # done, or aborted
            elif rng.random() < 0.06:  # preempted; resumed as a prompt, behind what of it is cached
                request.slot = self._moved(request)
                request.prompt = max(request.prompt, request.computed + 1)
                request.computed = int(rng.integers(request.computed + 1))
        chosen = [request for request in self._requests if rng.random() < 0.7] or self._requests[:1]
        if not mixed:
            chosen = [request for request in chosen if request.kind == chosen[0].kind]
        verify = bool(rng.random() < 0.4)
        return [self._work(request, verify) for request in rng.permutation(np.array(chosen, dtype=object))]

    def _work(self, request: _Request, verify: bool) -> Work:
        begin, ids = request.computed, request.ids
        kind, right = request.kind, 0
        if kind == "extend":
            tokens = ids[begin : min(request.prompt, begin + int(self._rng.integers(1, _CHUNK_MAX)))]
            request.computed += len(tokens)
        elif verify:
            kind, right = "verify", int(self._rng.integers(DRAFTS + 1))
            wrong = [777 + int(self._rng.integers(9)) for _ in range(DRAFTS - right)]
            tokens = [*ids[begin : begin + 1 + right], *wrong]
            request.computed += 1 + right
        else:
            tokens = ids[begin : begin + 1]
            request.computed += 1
        return Work(kind, request.slot, ids[:begin], tokens, right)

    def _slot(self) -> int:
        return self._free.pop(int(self._rng.integers(len(self._free))))

    def _moved(self, request: _Request) -> int:
        """Another slot, or the same again."""
        self._free.append(request.slot)
        return self._slot()
