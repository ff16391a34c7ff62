"""Token ids out of files: a corpus read piece by piece, whatever its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from engram_server.tokens import Encoder

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".html", ".htm", ".jsonl", ".csv")
"""Files of a folder that are read as text; a file that is named is read whatever its suffix."""
TOKEN_SUFFIX = ".npy"

_PIECE_BYTES = 1 << 20
"""Text that is tokenised at a time."""
_PART_CHARS = 32 << 10
"""A piece is cut into parts of about so much, at ends of lines, for the tokenizer's threads."""
_PIECE_TOKENS = 1 << 18


class CorpusError(ValueError):
    """A corpus that cannot be read as such. The text is a sentence."""


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """The files of a corpus, those of folders sorted by name. Raises CorpusError when there are none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            found += [file for file in inside if file.suffix in (*TEXT_SUFFIXES, TOKEN_SUFFIX)]
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise CorpusError(f"{path} is neither a file nor a folder, but a device or a pipe: give a file")
        else:
            raise CorpusError(f"there is no corpus {path}")
    if not found:
        names = ", ".join(str(path) for path in paths)
        raise CorpusError(f"{names}: no {', '.join((*TEXT_SUFFIXES, TOKEN_SUFFIX))} files in there")
    return found


def token_pieces(file: Path, encoder: Encoder) -> Iterator[tuple[NDArray[np.int32], int]]:
    """(token ids int32[n], bytes of the file they stand for) of a file, in order: one sequence in pieces.

    Text is cut at ends of lines, where some tokens may come out otherwise than in one go: good enough to count.
    Raises CorpusError for arrays that are no token ids, OSError.
    """
    return _array_pieces(file) if file.suffix == TOKEN_SUFFIX else _text_pieces(file, encoder)


def _array_pieces(file: Path) -> Iterator[tuple[NDArray[np.int32], int]]:
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, TokenError) as error:
        raise CorpusError(f"{file} is not a NumPy array: {error}") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype != np.int32:
        raise CorpusError(f"{file} is not a one-dimensional int32 array of token ids")
    for first in range(0, len(tokens), _PIECE_TOKENS):
        piece = np.array(tokens[first : first + _PIECE_TOKENS])
        yield piece, piece.nbytes


def _text_pieces(file: Path, encoder: Encoder) -> Iterator[tuple[NDArray[np.int32], int]]:
    with file.open("rb") as source:
        rest = b""
        while data := source.read(_PIECE_BYTES):
            # To the last end of a line; one so long that it has none is cut where the piece ends.
            cut = data.rfind(b"\n") + 1 or len(data)
            text, rest = rest + data[:cut], data[cut:]
            yield _tokens(text, encoder), len(data)
        if rest:
            yield _tokens(rest, encoder), 0


def _tokens(text: bytes, encoder: Encoder) -> NDArray[np.int32]:
    parts = _parts(text.decode("utf-8", errors="replace"))
    return np.concatenate([np.asarray(ids, dtype=np.int32) for ids in encoder.encode_all(parts)])


def _parts(text: str) -> list[str]:
    parts = []
    first = 0
    while first < len(text):
        end = text.rfind("\n", first, first + _PART_CHARS) + 1 or first + _PART_CHARS
        parts.append(text[first:end])
        first = end
    return parts


def corpus_bytes(files: Sequence[Path]) -> int:
    """Bytes of all files together."""
    return sum(file.stat().st_size for file in files)
