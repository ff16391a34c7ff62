"""What a cache of any size would have made of a trace, and how uneven it is.

A least-recently-used cache of n groups has an access exactly when fewer than n other groups came since the last one to
the same group: its stack distance. So the distances of one pass give the hit rate of every size at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_load._access import ACCESSES_MAX, Accesses
from engram_load._errors import LoadError
from engram_server.sizes import size_text

_TOP_SHARES = (0.001, 0.01, 0.1)
_DISTANCE_PERCENTS = (10, 25, 50, 75, 90, 99)
_SMALLEST_GROUPS = 64


def stack_distances(names: NDArray[Any]) -> NDArray[np.int64]:
    """int64[n]: of each access, how many others were accessed since the last one of its name; -1 = never before.

    With prev[i] the last access of the same name, that is the number of j < i with prev[j] < prev[i], less prev[i] + 1:
    all up to prev[i] are such j, and after it the first access to each other name. Counted bit by bit of the position,
    as a wavelet tree does: O(n log n).
    """
    n = len(names)
    previous = _previous(names)
    # Cold accesses have no distance; any order among them does.
    order = np.argsort(previous, kind="stable")
    smaller = np.zeros(n, dtype=np.int64)
    for bit in reversed(range(max(1, (n - 1).bit_length()))):
        # `order` has the positions in runs that agree above this bit, each run ascending by previous.
        one = (order >> bit & 1).astype(np.bool_)
        zeros_before: NDArray[np.int64] = np.cumsum(~one) - ~one
        run = order >> (bit + 1)
        in_run = zeros_before - (run << bit)  # every run before this one is whole: half of it zeros
        smaller[order[one]] += in_run[one]
        place = np.where(one, 0, (run << (bit + 1)) + in_run)
        at = np.arange(n)
        place[one] = (run[one] << (bit + 1)) + (1 << bit) + (at[one] - (run[one] << (bit + 1)) - in_run[one])
        moved = np.empty_like(order)
        moved[place] = order
        order = moved
    return np.where(previous < 0, -1, smaller - previous - 1)


def _previous(names: NDArray[Any]) -> NDArray[np.int64]:
    """int64[n]: the last access of the same name, -1 = there was none."""
    by_name = np.argsort(names, kind="stable")
    same = names[by_name[1:]] == names[by_name[:-1]]
    previous = np.full(len(names), -1, dtype=np.int64)
    previous[by_name[1:][same]] = by_name[:-1][same]
    return previous


@dataclass(frozen=True)
class Analysis:
    """Of one trace; counts are of row groups, each once a lookup."""

    lookups: int
    missing: int
    cut_short: bool
    rows: int
    distinct_rows_in_lookups: int
    accesses: int
    groups: int
    group_bytes: int
    top_shares: dict[str, float]
    """Share of all accesses that goes to the most popular part of the groups."""
    once: float
    """Share of the groups that were accessed once."""
    distances: dict[str, int]
    """Percentiles of the stack distance, in groups, of accesses that were not the first."""
    curve: list[tuple[int, float]]
    """(bytes of a cache, its hit rate), ascending."""
    truncated: bool


def analyze(accesses: Accesses, sizes: list[int]) -> Analysis:
    """sizes: bytes of caches that are wanted besides the powers of two. Raises LoadError, TraceError."""
    parts: list[NDArray[np.uint64]] = []
    count = rows = 0
    truncated = False
    for lookup in accesses:
        for groups in lookup:
            parts.append(groups.names)
            count += len(groups.names)
            rows += groups.rows
        if count >= ACCESSES_MAX:
            truncated = True
            break
    if not count:
        raise LoadError(f"{accesses.trace.path} holds no lookup of a row")
    names = np.concatenate(parts)
    del parts
    distances = stack_distances(names)
    times = np.sort(np.unique(names, return_counts=True)[1])[::-1]
    again = np.sort(distances[distances >= 0])
    group_bytes = accesses.group_bytes
    return Analysis(
        lookups=accesses.lookups,
        missing=accesses.trace.missing,
        cut_short=accesses.trace.cut_short,
        rows=accesses.rows,
        distinct_rows_in_lookups=rows,
        accesses=count,
        groups=len(times),
        group_bytes=group_bytes,
        top_shares={
            f"{100 * share:g}": float(times[: max(1, round(share * len(times)))].sum() / count)
            for share in _TOP_SHARES
        },
        once=float((times == 1).mean()),
        distances={
            str(percent): int(again[min(len(again) - 1, len(again) * percent // 100)])
            for percent in _DISTANCE_PERCENTS
            if len(again)
        },
        curve=[
            (size, float(np.searchsorted(again, size // group_bytes) / count))
            for size in _sizes(len(times), group_bytes, sizes)
        ],
        truncated=truncated,
    )


def _sizes(groups: int, group_bytes: int, wanted: list[int]) -> list[int]:
    """Powers of two up to one that holds everything, and those wanted."""
    found, size = set(wanted), 1 << (group_bytes * _SMALLEST_GROUPS - 1).bit_length()
    while size < 2 * groups * group_bytes:
        found.add(size)
        size *= 2
    return sorted(found | {size})


def analysis_text(analysis: Analysis, name: str) -> str:
    """For a terminal."""
    count, groups = analysis.accesses, analysis.groups
    lines = [
        f"{name}: {analysis.lookups:,} lookups of {analysis.rows:,} rows, "
        f"{analysis.distinct_rows_in_lookups:,} of them distinct within their lookup",
        f"  {count:,} accesses to {groups:,} row groups ({groups * analysis.group_bytes / (1 << 20):,.1f} MiB of rows)",
        f"  skew: {_shares(analysis)} of all accesses; {100 * analysis.once:.1f} % of the groups were accessed once",
    ]
    if analysis.distances:
        percents = ", ".join(
            f"p{percent} {distance:,} ({distance * analysis.group_bytes / (1 << 20):,.1f} MiB)"
            for percent, distance in analysis.distances.items()
        )
        lines.append(f"  reuse distance (other groups since the last access): {percents}")
    lines += ["", f"{'cache':>12}{'hit rate':>10}"]
    lines += [
        f"{size_text(size):>12}{100 * rate:>9.1f}%  {'#' * round(40 * rate)}" for size, rate in analysis.curve
    ]
    if analysis.missing:
        lines.append(
            f"WARNING: {analysis.missing:,} lookups were not recorded: the recorder fell behind or was full"
        )
    if analysis.cut_short:
        lines.append("WARNING: the trace ends within an entry, which is left out: its server was killed?")
    if analysis.truncated:
        lines.append(f"WARNING: the trace is longer; its first {count:,} accesses were looked at")
    return "\n".join(lines)


def _shares(analysis: Analysis) -> str:
    return ", ".join(
        f"the top {percent} % of the groups get {100 * share:.1f} %"
        for percent, share in analysis.top_shares.items()
    )
