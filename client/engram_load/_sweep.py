"""The same test for several values of a parameter, and the highest that meets an objective: of a cache, the lowest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engram_load._errors import LoadError
from engram_server.sizes import parse_size, size_text

Parameter = Literal["rate", "length", "concurrency", "cache"]
_PARAMETERS: tuple[Parameter, ...] = ("rate", "length", "concurrency", "cache")
_HALVINGS = 4
"""After doubling found the first value that is too high: the answer is right to a sixteenth of it."""
_POINTS_MAX = 64

_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_SLO = re.compile(r"(?:(\w+):)?(p\d{1,2}(?:\.\d{1,4})?|mean|max)<(\d{1,9}(?:\.\d{1,6})?)(us|ms|s)")


@dataclass(frozen=True)
class Objective:
    """A bound on a latency, of jobs that all succeed."""

    text: str
    series: str | None
    """None: the one that the pattern is about."""
    figure: str
    """p and a percentage, mean or max."""
    limit_ms: float

    def value_ms(self, point: dict[str, Any], main: str) -> float:
        """Of a point of a report. Raises LoadError for a series that it has not."""
        name = self.series or main
        for series in point["series"].values():
            if (found := series["latencies"].get(name)) is not None:
                if self.figure in ("mean", "max"):
                    return float(found[f"{self.figure}_ms"])
                # Not only those that are listed.
                from engram_load._measure import Latencies

                return Latencies(found["histogram"]).percentile_ms(float(self.figure[1:]))
        raise KeyError(name)

    def check(self, kinds: Sequence[str]) -> None:
        """Raise LoadError when there will be no latencies of its series, but of these."""
        if self.series is not None and self.series not in kinds:
            raise LoadError(
                f"--slo {self.text}: there are no latencies of {self.series!r} here, but of {', '.join(kinds)}"
            )

    def met(self, point: dict[str, Any], main: str) -> bool:
        """Whether a point keeps it, with jobs that were answered, and none that failed or was given up."""
        series = point["series"].values()
        lost = any(entry["failures"] or entry["unfinished"] for entry in series)
        idle = not any(entry["jobs"] for entry in series)
        return not lost and not idle and self.value_ms(point, main) < self.limit_ms

    def too_few(self, point: dict[str, Any], main: str) -> str | None:
        """A sentence when its percentile is no other figure than the longest of all; None else."""
        if not self.figure.startswith("p"):
            return None
        name = self.series or main
        count = next(
            series["latencies"][name]["count"]
            for series in point["series"].values()
            if name in series["latencies"]
        )
        needed = round(1 / max(1e-9, 1 - float(self.figure[1:]) / 100))
        if count >= needed:
            return None
        return f"{self.figure} of {count:,} {name}s is the longest of them: measure {needed:,} or more"


def parse_objective(text: str) -> Objective:
    """[SERIES:]pN<LIMIT, or mean or max in place of pN; LIMIT in us, ms or s. Raises LoadError."""
    match = _SLO.fullmatch(text.replace(" ", ""))
    if match is None or float(match[3]) == 0:
        raise LoadError(
            f"--slo {text!r} is no objective: expected something like p99<5ms, mean<800us or step:p99.9<20ms"
        )
    return Objective(text, match[1], match[2], float(match[3]) * _UNITS_MS[match[4]])


@dataclass(frozen=True)
class Sweep:
    """Values of a parameter: a list of them, or all from low to high."""

    parameter: Parameter
    values: tuple[float, ...]
    """Ascending; of a range its ends."""
    searched: bool
    """Whether it is a range."""


def parse_sweep(text: str) -> Sweep:
    """PARAMETER=V,V,... or PARAMETER=LOW..HIGH. Raises LoadError."""
    name, equals, values = text.partition("=")
    parameter = next((known for known in _PARAMETERS if known == name), None)
    if parameter is None or not equals:
        raise LoadError(
            f"--sweep {text!r} names no parameter that can be swept: expected rate=..., length=..., concurrency=... or "
            "cache=..."
        )
    low, dots, high = values.partition("..")
    parts = [low, high] if dots else values.split(",")
    if parameter == "cache":
        return _cache_sweep(text, parts, bool(dots))
    numbers = [float(part) for part in parts if re.fullmatch(r"\d{1,9}(\.\d{1,6})?", part)]
    whole = parameter == "rate" or all(number == int(number) for number in numbers)
    if len(numbers) != len(parts) or min(numbers) <= 0 or not whole or (dots and numbers[0] >= numbers[1]):
        raise LoadError(
            f"--sweep {text!r}: expected values above 0, {parameter}=V,V,... or {parameter}=LOW..HIGH"
            + ("" if parameter == "rate" else ", whole numbers")
        )
    if len(numbers) > _POINTS_MAX:
        raise LoadError(f"--sweep {text!r} has {len(numbers)} values; {_POINTS_MAX} are the most")
    return Sweep(parameter, tuple(sorted(set(numbers))), bool(dots))


def _cache_sweep(text: str, parts: Sequence[str], dots: bool) -> Sweep:
    """Sizes; a range is all doublings: what is wanted is the curve, and its lowest good value, not a highest."""
    try:
        sizes = [float(parse_size(part)) for part in parts]
    except ValueError as error:
        raise LoadError(f"--sweep {text!r}: {error}") from error
    if dots:
        if not 0 < sizes[0] < sizes[1]:
            raise LoadError(
                f"--sweep {text!r}: expected cache=SIZE..SIZE, the first above 0 and the smaller one"
            )
        sizes = list(_doubling(sizes))
    if len(sizes) > _POINTS_MAX:
        raise LoadError(f"--sweep {text!r} has {len(sizes)} values; {_POINTS_MAX} are the most")
    return Sweep("cache", tuple(sorted(set(sizes))), searched=False)


def value_text(parameter: str, value: float) -> str:
    """A value of a sweep in words."""
    return size_text(int(value)) if parameter == "cache" else f"{value:,.10g}"


@dataclass(frozen=True)
class Swept:
    """What came of a sweep."""

    points: list[dict[str, Any]]
    """Ascending."""
    best: float | None
    """The highest value that meets the objective, of a cache the lowest; None: none does, or there is no objective."""
    ended: str | None
    """Why it did not go on, in a sentence; None: it is whole."""


def run_sweep(
    sweep: Sweep, measure: Callable[[float], dict[str, Any]], met: Callable[[dict[str, Any]], bool] | None
) -> Swept:
    """Measure the values of a sweep.

    A range is doubled from its low end until a value fails, and then halved between. Of a list, values behind the first
    that fails are measured all the same, since a picture of them was asked for; none of them counts as met. A value
    that cannot be measured ends the sweep; raises LoadError when it is the first.
    """
    points: dict[float, dict[str, Any]] = {}

    def good(value: float) -> bool:
        try:
            point = measure(value)
        except LoadError as error:
            if not points:
                raise
            raise _EndedError(
                f"the sweep ends before {value_text(sweep.parameter, value)}: {error}"
            ) from error
        points[value] = point | {"value": value}
        if point["interrupted"]:
            raise _EndedError(None)
        return met is None or met(points[value])

    found: list[float] = []
    ended = None
    try:
        for value, is_good in _judged(sweep, good):
            found = [*found, value] if is_good else ([] if sweep.parameter == "cache" else found)
    except _EndedError as error:
        ended = error.why
    best = (min if sweep.parameter == "cache" else max)(found, default=None)
    return Swept([points[value] for value in sorted(points)], best if met is not None else None, ended)


class _EndedError(Exception):
    """The sweep cannot go on, or Ctrl-C came in one of its points."""

    def __init__(self, why: str | None) -> None:
        super().__init__(why)
        self.why = why


def _judged(sweep: Sweep, good: Callable[[float], bool]) -> Iterator[tuple[float, bool]]:
    """Values in the order they are measured, and whether each counts as one that meets the objective."""
    if not sweep.searched:
        holding = True
        for value in sweep.values:
            is_good = good(value)
            holding = is_good and (holding or sweep.parameter == "cache")
            yield value, holding
        return
    best: float | None = None
    for value in _doubling(sweep.values):
        if not good(value):
            yield value, False
            break
        yield value, True
        best = value
    else:
        return
    if best is not None:
        yield from _halved(sweep, good, best, value)


def _doubling(ends: Sequence[float]) -> Iterator[float]:
    value, high = ends
    while value < high:
        yield value
        value *= 2
    yield high


def _halved(
    sweep: Sweep, good: Callable[[float], bool], best: float, failed: float
) -> Iterator[tuple[float, bool]]:
    for _ in range(_HALVINGS):
        middle = (best + failed) / 2
        if sweep.parameter != "rate":
            middle = float(int(middle))
        if middle in (best, failed):
            break
        is_good = good(middle)
        yield middle, is_good
        if is_good:
            best = middle
        else:
            failed = middle
