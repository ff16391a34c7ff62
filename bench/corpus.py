"""Real text for the benchmarks: the sources of Python's own manual, from Debian's python3-doc, tokenised exactly.

`apt-get download` fetches the package (13 MB) once and `dpkg-deb` unpacks it beside the tables: nothing is installed
and root is not needed. ENGRAM_BENCH_TEXT names a file or folder of .txt to take instead, for machines without apt.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.scale import Scale
from engram_server.tokens import encode

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = "usr/share/doc/*/html/_sources/library/*.rst.txt"
"""The library reference: 6 MB of prose and signatures."""
CHARACTERS_PER_TOKEN_MAX = 6
"""More than ordinary text has: how much of it holds so many tokens."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """One long text."""

    source: str
    tokens: NDArray[np.int32]
    """int32[T], no special tokens."""

    def document(self, number: int, tokens: int) -> NDArray[np.int32]:
        """Piece `number` of pieces of so many tokens. Raises ValueError when the text is too short for it."""
        piece = self.tokens[number * tokens : (number + 1) * tokens]
        if len(piece) < tokens:
            raise ValueError(
                f"{self.source} has {len(self.tokens)} tokens, but {(number + 1) * tokens} are needed: name a "
                "longer text in ENGRAM_BENCH_TEXT"
            )
        return piece


def load(scale: Scale, tokenizer: Path, tokens: int) -> Corpus:
    """So many tokens of text or more, if there are, by the model's tokenizer.

    Raises OSError or RuntimeError when there is no text and none can be fetched.
    """
    source, files = _files(scale)
    text = ""
    for file in files:
        if len(text) > tokens * CHARACTERS_PER_TOKEN_MAX:
            break
        text += file.read_text(encoding="utf-8", errors="replace")
    return Corpus(source, np.asarray(encode(tokenizer, text), dtype=np.int32))


def _files(scale: Scale) -> tuple[str, list[Path]]:
    named = os.environ.get("ENGRAM_BENCH_TEXT")
    if named:
        path = Path(named)
        return named, sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if scale.quick:
        return "this project's documents", [
            ROOT / name for name in ("README.md", "docs/architecture.md", "LICENSE")
        ]
    folder = scale.beside("-text")
    if not folder.exists():
        _fetch(folder)
    files = sorted(folder.glob(CHAPTERS))
    if not files:
        raise RuntimeError(
            f"{folder} holds none of {CHAPTERS}: delete it, or name a text in ENGRAM_BENCH_TEXT"
        )
    return f"{files[0].parents[3].name} manual, library reference (Debian)", files


def _fetch(folder: Path) -> None:
    """Download and unpack the package that python3-doc stands for, whole or not at all."""
    print(f"  fetching Debian's Python manual to {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent.absolute()) as scratch:
        _run(["apt-get", "download", _manual_package()], scratch)
        (package,) = Path(scratch).glob("*.deb")
        _run(["dpkg-deb", "--extract", str(package), "text"], scratch)
        Path(scratch, "text").rename(folder)


def _manual_package() -> str:
    found = re.search(r"Depends: (python3\.\d+-doc)", _run(["apt-cache", "depends", "python3-doc"]))
    if found is None:
        raise RuntimeError(
            "apt knows no python3-doc: run `apt-get update` as root, or name a text in ENGRAM_BENCH_TEXT"
        )
    return found[1]


def _run(command: list[str], folder: str | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(
            f"there is no {command[0]} here to fetch a text with: name one in ENGRAM_BENCH_TEXT"
        ) from None
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed ({done.stderr.strip()}): run `apt-get update` as root, or name a text in "
            "ENGRAM_BENCH_TEXT"
        )
    return done.stdout
