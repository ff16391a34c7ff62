"""What is asked for: each pattern is an endless run of jobs.

A job is what somebody waits for: a prompt, whose chunks are asked for one after another as an engine computes them, or
a decode step, which is one request. Text is real text, row ids are spread over the whole table.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engram_client import Lane
from engram_client._query import BlockKeys, RowKeys, TokenKeys
from engram_load._corpus import Corpus, Lengths
from engram_server.spec import EngramSpec

CHUNK_TOKENS = 2048
"""What engines compute of a prompt at a time, unless told otherwise."""


@dataclass(frozen=True, eq=False)
class Request:
    """One lookup."""

    keys: TokenKeys | BlockKeys | RowKeys
    lane: Lane = "auto"
    layers: tuple[int, ...] | None = None
    columns: tuple[int, int] | None = None
    unique: bool = False

    @property
    def tokens(self) -> int:
        """Positions; of a list of rows, the number of ids."""
        match self.keys:
            case TokenKeys(sequences):
                return sum(len(tokens) for tokens, _ in sequences)
            case BlockKeys(layers):
                return len(next(iter(layers.values())))
            case RowKeys(_, ids):
                return len(ids)

    @property
    def held_bytes(self) -> int:
        """About what it takes in memory; tokens are part of their text."""
        match self.keys:
            case TokenKeys(sequences):
                return 400 * len(sequences)
            case BlockKeys(layers):
                return sum(ids.nbytes for ids in layers.values())
            case RowKeys(_, ids):
                return ids.nbytes


@dataclass(frozen=True, eq=False)
class Job:
    """Requests that are sent one after another, each when the one before was answered."""

    requests: Sequence[Request]
    at_s: float = 0.0
    """When a recorded one began, in seconds from the first."""


def prefill(
    corpus: Corpus, lengths: Lengths, chunk: int, look_back: int, rng: random.Random
) -> Iterator[Job]:
    """Prompts of real text, each other text than the one before, until the corpus is used up."""
    while True:
        yield Job(_chunks(corpus.take(lengths.draw(rng)), chunk, look_back))


def repeat(token: int, lengths: Lengths, chunk: int, look_back: int, rng: random.Random) -> Iterator[Job]:
    """Prompts of one token alone: what benchmarks of others send, and nobody else."""
    while True:
        yield Job(_chunks(np.full(lengths.draw(rng), token, dtype=np.int32), chunk, look_back))


def _chunks(prompt: NDArray[np.int32], chunk: int, look_back: int) -> list[Request]:
    return [
        Request(TokenKeys(((prompt[at : at + chunk], prompt[max(0, at - look_back) : at]),)))
        for at in range(0, len(prompt), chunk)
    ]


@dataclass(frozen=True)
class Decoding:
    """How an engine decodes."""

    batch: int = 8
    """Sequences that advance together."""
    steps: int = 256
    """After so many, a sequence ends, and another begins elsewhere in the text."""
    drafts: int = 0
    """Speculative tokens of each sequence and step."""
    accept: float = 0.7
    """Chance that a draft is right, if those before it were."""


def decode(corpus: Corpus, how: Decoding, look_back: int, rng: random.Random) -> Iterator[Job]:
    """Steps of one batch: a new token of each sequence, its drafts behind it, and its look-back.

    Drafts that were wrong are not in the text: another token stands for them, and none enters a later look-back.
    """
    text = corpus.tokens
    # A sequence that began at the very end would have nothing to go on with.
    span = min(len(text), how.steps * (1 + how.drafts) + how.drafts + 1)
    places = [rng.randrange(len(text) - span + 1) for _ in range(how.batch)]
    left = [rng.randint(1, how.steps) for _ in range(how.batch)]  # not all begin at once
    while True:
        sequences = []
        for i, at in enumerate(places):
            right = 0
            while right < how.drafts and rng.random() < how.accept:
                right += 1
            step = np.array(text[at : at + 1 + right])
            wrong = [int(text[rng.randrange(len(text))]) for _ in range(how.drafts - right)]
            tokens = np.concatenate([step, np.asarray(wrong, dtype=np.int32)])
            sequences.append((tokens, text[max(0, at - look_back) : at]))
            left[i] -= 1
            places[i] = at + 1 + right
            if left[i] == 0 or places[i] + how.drafts >= len(text):
                places[i], left[i] = rng.randrange(len(text) - span + 1), how.steps
        yield Job([Request(TokenKeys(tuple(sequences)), lane="decode")])


class Unasked:
    """The rows of all tables, in an order without order; one that is used up begins again."""

    def __init__(self, rows: Mapping[int, int], columns: int, seed: int) -> None:
        """rows: of each table, by layer."""
        self._orders = {layer: Shuffled(count, seed + layer) for layer, count in rows.items()}
        self._columns = columns
        self._at = 0

    @property
    def wraps(self) -> int:
        """How often the smallest table was used up, and begun again."""
        return max(0, self._at - 1) // min(order.count for order in self._orders.values())

    def take(self, positions: int) -> dict[int, NDArray[np.int64]]:
        """The next ones, by layer: int64[positions, columns]."""
        count, at = positions * self._columns, self._at
        self._at += count
        return {
            layer: order.take(at, count).reshape(positions, self._columns)
            for layer, order in self._orders.items()
        }


def uniform(rows: Unasked, positions: int) -> Iterator[Job]:
    """Rows that were not asked for before: what no cache can help."""
    while True:
        yield Job([Request(BlockKeys(rows.take(positions)))])


def zipf(
    spec: EngramSpec, layers: Sequence[int], positions: int, skew: float, rng: random.Random
) -> Iterator[Job]:
    """Row groups by rank, the r-th most popular asked for about r ** -skew as often as the first.

    As many n-grams of each order as a column has rows. A rank is drawn from the continuous distribution, where the
    first few come out a little off.
    """
    draws = np.random.default_rng(rng.randrange(2**63))
    orders = spec.max_ngram_size - 1
    ngrams = spec.engram_vocab_size
    planes = {layer: spec.layers.index(layer) for layer in layers}
    while True:
        ranks = _zipf_ranks(draws.random((positions, orders)), ngrams, skew)
        blocks = {}
        for layer, plane in planes.items():
            ids = np.empty((positions, spec.columns), dtype=np.int64)
            for column in range(spec.columns):
                prime, offset = spec.primes[plane][column], spec.offsets[plane][column]
                rank = ranks[:, column // spec.heads]
                ids[:, column] = offset + (_mixed(rank, layer * 1_000 + column) % np.uint64(prime)).astype(
                    np.int64
                )
            blocks[layer] = ids
        yield Job([Request(BlockKeys(blocks))])


def _zipf_ranks(uniform: NDArray[np.float64], ngrams: int, skew: float) -> NDArray[np.int64]:
    """Ranks 1 .. ngrams, by the inverse of the distribution whose density is x ** -skew from 1 to ngrams + 1."""
    top = float(ngrams + 1)
    if abs(skew - 1.0) < 1e-9:
        drawn = top**uniform
    else:
        drawn = (1.0 + uniform * (top ** (1.0 - skew) - 1.0)) ** (1.0 / (1.0 - skew))
    return np.minimum(drawn.astype(np.int64), ngrams)


class Shuffled:
    """The numbers 0 .. count - 1 in an order that looks random, without a table of them."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self._bits = max(2, (count - 1).bit_length())
        rng = random.Random(seed)
        self._keys = [(rng.randrange(2**self._bits) | 1, rng.randrange(2**self._bits)) for _ in range(4)]

    def take(self, first: int, count: int) -> NDArray[np.int64]:
        """Numbers at places first .. first + count - 1 (modulo the count), int64[count]."""
        found = self._permuted(np.arange(first, first + count, dtype=np.uint64) % np.uint64(self.count))
        # A permutation of a power of two, walked on until it is back inside.
        while (outside := found >= self.count).any():
            found[outside] = self._permuted(found[outside])
        return found.astype(np.int64)

    def _permuted(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mask = np.uint64(2**self._bits - 1)
        shift = np.uint64((self._bits + 1) // 2)
        for factor, term in self._keys:  # each step can be undone: odd factors, and shifts of at least half
            numbers = (numbers * np.uint64(factor) + np.uint64(term)) & mask
            numbers ^= numbers >> shift
        return numbers


def _mixed(numbers: NDArray[np.int64], salt: int) -> NDArray[np.uint64]:
    """splitmix64's finish: neighbours become strangers."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(salt + 1)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
