"""What a benchmark answers: a figure, what it stands beside, and the bar that was set for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Bar:
    """What a result must reach."""

    sign: Literal[">=", "<="]
    limit: float
    of: Literal["ratio", "value"] = "ratio"

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    what: str
    """The value, in words for people who do not know the project."""
    value: float
    unit: str
    reference: float
    """The ceiling or rival from the same run, in the same unit."""
    reference_name: str
    ratio: float
    """value / reference; of pairs, the median of the pairs' ratios."""
    bar: Bar | None = None
    details: Mapping[str, float | str] = field(default_factory=dict)
    """What else was seen; every key says its unit."""

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached; None without a bar."""
        if self.bar is None:
            return None
        figure = self.ratio if self.bar.of == "ratio" else self.value
        return figure >= self.bar.limit if self.bar.sign == ">=" else figure <= self.bar.limit

    def document(self) -> dict[str, Any]:
        """As it stands in latest.json."""
        return {
            "name": self.name,
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "reference": self.reference,
            "reference_name": self.reference_name,
            "ratio": self.ratio,
            "bar": None if self.bar is None else f"{self.bar.of} {self.bar}",
            "met": self.met,
            "details": dict(self.details),
        }
