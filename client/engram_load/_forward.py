"""A forward that computes nothing: it sleeps where a model would compute, and waits for rows where it needs them.

What an engine feels of its tables is not how long a lookup takes, but how long a layer stands still because its rows
are not there yet. Rows of all layers are asked for when the forward begins, a lookup for each layer, as `RowPrefetcher`
does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

from engram_client import Lookup
from engram_load._errors import LoadError
from engram_load._patterns import Request

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_REACH = re.compile(r"(\d{1,4})=(\d{1,6}(?:\.\d{1,6})?)(us|ms|s)")


@dataclass(frozen=True)
class Forward:
    """When layers need their rows."""

    text: str
    reaches: tuple[tuple[int, float], ...]
    """(layer, seconds of computing from the forward's beginning until there), ascending in both."""

    def check(self, layers: tuple[int, ...]) -> None:
        """Raise LoadError unless it names the layers that have tables."""
        named = tuple(layer for layer, _ in self.reaches)
        if named != layers:
            raise LoadError(
                f"--forward {self.text} names layers {_listed(named)}, but tables are of {_listed(layers)}: say of "
                "each when it is reached"
            )

    def run(
        self, send: Callable[[Request], Lookup], pool: ThreadPoolExecutor, request: Request
    ) -> tuple[list[Lookup], dict[int, int]]:
        """One forward: the rows of each layer, and by layer the nanoseconds that it stood still. Raises EngramError."""
        asked = {layer: pool.submit(send, replace(request, layers=(layer,))) for layer, _ in self.reaches}
        found, stalls, computed_s = [], {}, 0.0
        for layer, reach_s in self.reaches:
            time.sleep(reach_s - computed_s)
            computed_s = reach_s
            reached_ns = time.monotonic_ns()
            found.append(asked[layer].result())
            stalls[layer] = time.monotonic_ns() - reached_ns
        return found, stalls


def parse_forward(text: str) -> Forward:
    """LAYER=TIME,...; TIME in us, ms or s, from the forward's beginning. Raises LoadError."""
    matches = [_REACH.fullmatch(part) for part in text.replace(" ", "").split(",")]
    reaches = [(int(match[1]), float(match[2]) * _UNITS_S[match[3]]) for match in matches if match]
    ascending = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(reaches))
    if len(reaches) != len(matches) or not ascending:
        raise LoadError(
            f"--forward {text!r} is no forward: expected LAYER=TIME of each layer with a table, ascending, such as "
            "1=2ms,14=15ms: what is computed from the beginning until that layer"
        )
    return Forward(text, tuple(reaches))


def _listed(layers: tuple[int, ...]) -> str:
    return " and ".join(map(str, layers))
