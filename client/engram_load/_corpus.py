"""Real text as prompts: files or folders, tokenised exactly, cut into prompts of the lengths asked for."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_load._errors import LoadError
from engram_server.corpus import TOKEN_SUFFIX, corpus_files, token_pieces
from engram_server.tokens import Encoder
from engram_server.trace import is_trace

TOKENS_MAX = 4_000_000
"""Tokens of a corpus that are taken: 16 MB, some seconds to tokenise, and thousands of prompts."""

_HEAD_BYTES = 64 << 10
"""Of a file, looked at for what no text has."""
_LENGTH_MAX = 1 << 20
_NUMBER = r"(\d{1,7})"


class Corpus:
    """One long line of tokens, handed out piece by piece. Safe to share between threads."""

    def __init__(self, source: str, tokens: NDArray[np.int32]) -> None:
        self.source = source
        self.tokens = tokens
        """int32[T], one document after another."""
        self._lock = threading.Lock()
        self._next = 0
        self.wraps = 0
        """How often it was used up, and begun again."""

    def rewind(self) -> None:
        """Hand it out from its beginning."""
        with self._lock:
            self._next = 0

    def take(self, count: int) -> NDArray[np.int32]:
        """The next `count` tokens. Raises LoadError when the whole corpus has fewer."""
        if count > len(self.tokens):
            raise LoadError(
                f"{self.source} has {len(self.tokens):,} tokens, but a prompt wants {count:,}: give more text, or a "
                "smaller --length"
            )
        with self._lock:
            if self._next + count > len(self.tokens):
                self._next = 0
                self.wraps += 1
            first = self._next
            self._next += count
        return self.tokens[first : first + count]


def load_corpus(paths: Sequence[Path], tokenizer: Path, tokens_max: int = TOKENS_MAX) -> Corpus:
    """Text files, .npy files of token ids, and folders of both, until there are `tokens_max` tokens.

    Raises CorpusError, TokenMapError, OSError; LoadError when there is no token in them.
    """
    encoder = Encoder(tokenizer)
    parts: list[NDArray[np.int32]] = []
    found = 0
    for file in corpus_files(paths):
        if is_trace(file):
            raise LoadError(f"{file} is a trace, and no text: send it with `engram-load replay`")
        if file.suffix != TOKEN_SUFFIX and _is_binary(file):
            raise LoadError(f"{file} is no text: it has zero bytes")
        for piece, _ in token_pieces(file, encoder):
            parts.append(piece)
            found += len(piece)
            if found >= tokens_max:
                break
        if found >= tokens_max:
            break
    source = ", ".join(str(path) for path in paths)
    if not found:
        raise LoadError(f"{source}: there is no text in there, only empty files")
    return Corpus(source, np.concatenate(parts)[:tokens_max])


def _is_binary(file: Path) -> bool:
    with file.open("rb") as source:
        return b"\0" in source.read(_HEAD_BYTES)


@dataclass(frozen=True)
class Lengths:
    """How long prompts are, as --length says it."""

    text: str
    draw: Callable[[random.Random], int]
    largest: int


def parse_lengths(text: str) -> Lengths:
    """N, N,N,... (one of these each time), uniform:LOW-HIGH, or lognormal:MEDIAN,SIGMA. Raises LoadError."""
    if match := re.fullmatch(rf"uniform:{_NUMBER}-{_NUMBER}", text):
        low, high = int(match[1]), int(match[2])
        if 1 <= low <= high <= _LENGTH_MAX:
            return Lengths(text, lambda rng: rng.randint(low, high), high)
    elif match := re.fullmatch(rf"lognormal:{_NUMBER},(\d(?:\.\d{{1,4}})?)", text):
        median, sigma = int(match[1]), float(match[2])
        if 1 <= median <= _LENGTH_MAX:
            # The tail has no end: 16 times the median is where a context would have one.
            largest = min(_LENGTH_MAX, 16 * median)
            return Lengths(
                text, lambda rng: min(largest, max(1, round(median * rng.lognormvariate(0, sigma)))), largest
            )
    elif re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", text):
        choices = [int(part) for part in text.split(",")]
        if all(1 <= choice <= _LENGTH_MAX for choice in choices):
            return Lengths(text, lambda rng: rng.choice(choices), max(choices))
    raise LoadError(
        f"--length {text} is not a prompt length: expected 1 to {_LENGTH_MAX} as N, N,N,... (one of them each time), "
        "uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA"
    )
