"""How two sides are compared: by turns in one run, by medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def interleaved(label: str, rounds: int, sides: Mapping[str, Callable[[int], Any]]) -> dict[str, list[Any]]:
    """Call every side once a round, with the round's number; every other round in reverse.

    What drifts (clock, neighbours, device) then drifts for all sides alike, and none always comes after another.
    """
    outcomes: dict[str, list[Any]] = {name: [] for name in sides}
    order = list(sides)
    for number in progress(range(rounds), label, "round"):
        for name in order if number % 2 == 0 else reversed(order):
            outcomes[name].append(sides[name](number))
    return outcomes


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the rounds of ours / theirs."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def progress(items: Iterable[T], label: str, unit: str) -> Iterator[T]:
    """`items`, with a bar on a terminal when they take longer than two seconds."""
    yield from tqdm(items, desc=f"  {label}", unit=unit, delay=2, leave=False, disable=None)
