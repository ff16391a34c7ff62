"""The same test for several values of a parameter, and the highest that meets an objective."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engram_load._errors import LoadError

Parameter = Literal["rate", "length", "concurrency"]
_PARAMETERS: tuple[Parameter, ...] = ("rate", "length", "concurrency")
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
        known = ", ".join(name for series in point["series"].values() for name in series["latencies"])
        raise LoadError(f"--slo {self.text}: there are no latencies of {name!r} here, but of {known}")

    def met(self, point: dict[str, Any], main: str) -> bool:
        """Whether a point keeps it, with no job failed or given up."""
        lost = any(series["failures"] or series["unfinished"] for series in point["series"].values())
        return not lost and self.value_ms(point, main) < self.limit_ms


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
            f"--sweep {text!r} names no parameter that can be swept: expected rate=..., length=... or concurrency=..."
        )
    low, dots, high = values.partition("..")
    parts = [low, high] if dots else values.split(",")
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


def run_sweep(
    sweep: Sweep, measure: Callable[[float], dict[str, Any]], met: Callable[[dict[str, Any]], bool] | None
) -> tuple[list[dict[str, Any]], float | None]:
    """The points measured, ascending, and the highest value that meets the objective; None: none does, or there is no
    objective.

    A range is doubled from its low end until a value fails, and then halved between. Of a list, values behind the first
    that fails are measured all the same, since a picture of them was asked for; none of them counts as met.
    """
    points: dict[float, dict[str, Any]] = {}

    def good(value: float) -> bool:
        points[value] = measure(value) | {"value": value}
        if points[value]["interrupted"]:
            raise _InterruptedError
        return met is None or met(points[value])

    best: float | None = None
    try:
        if not sweep.searched:
            holding = True
            for value in sweep.values:
                holding = good(value) and holding
                best = value if holding else best
        else:
            best, failed = _doubled(sweep, good)
            if failed is not None and best is not None:
                best = _halved(sweep, good, best, failed)
    except _InterruptedError:
        pass
    ordered = [points[value] for value in sorted(points)]
    return ordered, best if met is not None else None


class _InterruptedError(Exception):
    """Ctrl-C in one of the points."""


def _doubled(sweep: Sweep, good: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """The last value that was good, and the first that was not."""
    best = None
    for value in _doubling(sweep.values):
        if not good(value):
            return best, value
        best = value
    return best, None


def _doubling(ends: Sequence[float]) -> Iterator[float]:
    value, high = ends
    while value < high:
        yield value
        value *= 2
    yield high


def _halved(sweep: Sweep, good: Callable[[float], bool], best: float, failed: float) -> float:
    for _ in range(_HALVINGS):
        middle = (best + failed) / 2
        if sweep.parameter != "rate":
            middle = float(int(middle))
        if middle in (best, failed):
            break
        if good(middle):
            best = middle
        else:
            failed = middle
    return best
