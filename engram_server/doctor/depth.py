"""The depth at which a device stops gaining: random reads with 1 to 256 of them in flight."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from engram_kernels import _core
from engram_server.doctor.finding import Finding
from engram_server.doctor.reads import Target

DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = 0.4
"""Of reading at each depth, all rounds together."""

ROUNDS = 3
"""Depths take turns, so that a neighbour's burst slows a round of each and not one depth."""

KNEE = 0.9
"""The knee is the smallest depth that gives this part of the best rate."""

_BATCH_READS_MAX = 1 << 17
_SLOW_LATENCY_S = 1e-3
"""At depth 1. NVMe flash answers in a tenth of it."""

_SPREAD_MAX = 1.5


@dataclass(frozen=True)
class DepthPoint:
    """What one depth gives."""

    depth: int
    rates: tuple[float, ...]
    """Reads/s, [round]."""

    @property
    def reads_per_s(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rates)

    @property
    def latency_s(self) -> float:
        """Mean from submission to completion, by Little's law: depth / rate."""
        return self.depth / self.reads_per_s

    @property
    def spread(self) -> float:
        """Fastest round over slowest."""
        return max(self.rates) / min(self.rates)


def sweep(
    target: Target,
    backend: str,
    depths: Sequence[int] = DEPTHS,
    seconds: float = SECONDS,
    progress: bool = False,
) -> list[DepthPoint]:
    """Read random rows of a target for `seconds` at each depth, in rounds over all depths.

    With `progress`, a bar goes to stderr when that is a terminal. Raises OSError when a read fails.
    """
    rates: dict[int, list[float]] = {depth: [] for depth in depths}
    hidden = None if progress else True  # None: where stderr is no terminal
    layout = "{desc}{percentage:3.0f}%|{bar}| {remaining} left"
    with tqdm(total=ROUNDS * len(depths), leave=False, disable=hidden, bar_format=layout) as bar:
        for _ in range(ROUNDS):
            for depth in depths:
                bar.set_description(f"random reads, {depth} in flight")
                rates[depth].append(_rate(target, backend, depth, seconds / ROUNDS))
                bar.update()
    return [DepthPoint(depth, tuple(rates[depth])) for depth in depths]


def _rate(target: Target, backend: str, depth: int, seconds: float) -> float:
    """Reads/s over `seconds`."""
    rng = np.random.default_rng()
    with closing(_core.Reader([str(file) for file in target.files], backend=backend, depth=depth)) as reader:
        # A first batch warms up and tells the speed. Then each lasts as long as is left, in one native call,
        # so that the pipeline stays full and Python is not measured.
        count = max(16, 2 * depth)
        rate = count / _timed_read(reader, target, rng, count)
        reads, spent = 0, 0.0
        while spent < seconds:
            count = min(int(rate * (seconds - spent)) + 4 * depth, _BATCH_READS_MAX)
            spent += _timed_read(reader, target, rng, count)
            reads += count
            rate = reads / spent
    return rate


def _timed_read(reader: _core.Reader, target: Target, rng: np.random.Generator, count: int) -> float:
    """Seconds that `count` random rows take."""
    file, offset, length = target.draw(rng, count)
    out = np.empty((count, target.row_bytes), dtype=np.uint8)
    started = time.perf_counter()
    errors = reader.read(file, offset, length, out)
    elapsed = time.perf_counter() - started
    for i in np.flatnonzero(errors)[:1]:
        error = int(errors[i])
        where = f"reading {length[i]} B at {offset[i]} of {target.files[file[i]]}"
        raise OSError(f"{where} failed: {_core.error_text(error)}")
    return elapsed


def knee_of(points: Sequence[DepthPoint]) -> DepthPoint:
    """The shallowest point with KNEE of the best rate."""
    best = max(point.reads_per_s for point in points)
    return min((point for point in points if point.reads_per_s >= KNEE * best), key=lambda point: point.depth)


def explain_depth(points: Sequence[DepthPoint], reads_per_token: int | None, default: int) -> list[Finding]:
    """Where the knee is, what to set, and how far to trust it. `default` is the depth served with unasked."""
    return [
        _explain_knee(points, reads_per_token, default),
        *_explain_latency(points),
        *_explain_spread(points),
    ]


def _explain_knee(points: Sequence[DepthPoint], reads_per_token: int | None, default: int) -> Finding:
    knee = knee_of(points)
    part = knee.reads_per_s / max(point.reads_per_s for point in points)
    text = f"{knee.depth} in flight give {knee.reads_per_s:,.0f} reads/s, {part:.0%} of the best; "
    if knee.depth == max(point.depth for point in points):
        text += "it is the deepest tried, and more might give more"
    else:
        text += "deeper adds latency for little"
    if reads_per_token:
        tokens = knee.reads_per_s / reads_per_token
        text += f". That is {tokens:,.0f} tokens/s if all {reads_per_token} reads of a token go to the disk"
    by_default = "which is the default" if knee.depth == default else f"the default is {default}"
    return Finding("knee", "ok", text, f"serve with --io-depth {knee.depth} ({by_default})")


def _explain_latency(points: Sequence[DepthPoint]) -> Iterator[Finding]:
    for point in points:
        if point.depth == 1 and point.latency_s > _SLOW_LATENCY_S:
            yield Finding(
                "latency",
                "note",
                f"one read alone takes {point.latency_s * 1e3:.2g} ms, NVMe flash 0.1: this is a network "
                "volume, a spinning disk, or busy",
            )


def _explain_spread(points: Sequence[DepthPoint]) -> Iterator[Finding]:
    worst = max(points, key=lambda point: point.spread)
    if worst.spread > _SPREAD_MAX:
        yield Finding(
            "spread",
            "note",
            f"rounds at depth {worst.depth} ranged from {min(worst.rates):,.0f} to {max(worst.rates):,.0f} "
            "reads/s: something else uses the disk or the CPUs",
            "measure again when they are idle",
        )
