"""How large a run of the benchmarks is, and where its data lies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Scale:
    """Sizes of one run. Everything else about a benchmark stands in its own file."""

    data: Path = Path("data/bench")
    """The checkpoint; packed store, text and copies come beside it, on the disk that is measured."""
    vocab_size: int = 2_000_000
    """13 GB of FP4 tables: smaller ones share pages between rows and flatter the page cache."""
    quick: bool = False
    """Only to see that everything runs, in seconds: the figures mean nothing."""

    @classmethod
    def from_environment(cls) -> Scale:
        """ENGRAM_BENCH_DATA, ENGRAM_BENCH_VOCAB_SIZE, ENGRAM_BENCH_QUICK. Raises ValueError."""
        vocab_size = os.environ.get("ENGRAM_BENCH_VOCAB_SIZE", str(cls.vocab_size))
        if not vocab_size.isdigit():
            raise ValueError(
                f"ENGRAM_BENCH_VOCAB_SIZE is {vocab_size!r}: give rows per column, such as 2000000"
            )
        quick = os.environ.get("ENGRAM_BENCH_QUICK", "") not in ("", "0")
        return cls(Path(os.environ.get("ENGRAM_BENCH_DATA", str(cls.data))), int(vocab_size), quick)

    def pick(self, full: int, quick: int) -> int:
        """A size: `full` for figures, `quick` for a test."""
        return quick if self.quick else full

    @property
    def pairs(self) -> int:
        """Rounds of every comparison."""
        return self.pick(7, 1)

    def beside(self, suffix: str) -> Path:
        """A path on the same disk as the checkpoint."""
        return self.data.with_name(self.data.name + suffix)
