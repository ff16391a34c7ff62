"""One line of the doctor's report, and how it words quantities."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "degraded", "error"]
"""note: worth knowing, costs speed at most. degraded: a fallback serves. error: nothing can be served."""


@dataclass(frozen=True)
class Finding:
    """A fact, what it means and, where it is not good, what to do."""

    topic: str
    level: Level
    text: str
    advice: str = ""


def size_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.4g} {unit}"
    return f"{count} B"


def plural(count: int, noun: str) -> str:
    """ "1 ring", "2 rings"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
