"""Row ids by the written rule, one position at a time, in Python integers."""

from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN = -1


@dataclass(frozen=True)
class Model:
    """Everything a row id depends on."""

    token_map: Sequence[int]
    pad_class: int
    image_token_id: int
    multipliers: Sequence[Sequence[int]]
    """[layer][shift]"""
    primes: Sequence[Sequence[int]]
    """[layer][column]"""

    @property
    def max_ngram_size(self) -> int:
        return len(self.multipliers[0])

    @property
    def offsets(self) -> list[list[int]]:
        """[layer][column]: the rows of the columns before it."""
        return [[sum(primes[:column]) for column in range(len(primes))] for primes in self.primes]


def first_primes(start: int, count: int) -> list[int]:
    """The first primes from `start` on, by trial division."""
    found: list[int] = []
    candidate = max(start, 2)
    while len(found) < count:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
        candidate += 1
    return found


def classes_at(model: Model, ids: Sequence[int], position: int) -> list[int]:
    """Class ids at shifts 0 .. N - 1 of `position`; ids[0] is the first token, or the oldest known."""
    classes = []
    blocked = False
    for shift in range(model.max_ngram_size):
        before_start = position - shift < 0
        blocked = blocked or before_start or ids[position - shift] == model.image_token_id
        if blocked or ids[position - shift] == UNKNOWN:
            classes.append(model.pad_class)
        else:
            classes.append(model.token_map[ids[position - shift]])
    return classes


def rows_of(model: Model, classes: Sequence[int]) -> list[list[int]]:
    """[layer][column] row ids of one n-gram, classes newest first."""
    heads = len(model.primes[0]) // (model.max_ngram_size - 1)
    rows = []
    for layer, factors in enumerate(model.multipliers):
        line = []
        for column, prime in enumerate(model.primes[layer]):
            order = column // heads + 2
            mixed = 0
            for shift in range(order):
                mixed ^= classes[shift] * factors[shift]
            line.append(mixed % prime + sum(model.primes[layer][:column]))
        rows.append(line)
    return rows


def hash_sequence(
    model: Model, tokens: Sequence[int], history: Sequence[int] = ()
) -> tuple[list[list[list[int]]], list[bool]]:
    """[token][layer][column] row ids and [token] mask; history is oldest first."""
    ids = [*history, *tokens]
    positions = range(len(history), len(ids))
    rows = [rows_of(model, classes_at(model, ids, position)) for position in positions]
    return rows, [token == model.image_token_id for token in tokens]
