"""How fast do token ids become row ids, beside the fastest NumPy form of the hash? Same ids, one core."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import one_core
from bench.pairs import interleaved, median_ratio
from bench.result import Result
from bench.scale import Scale
from engram_kernels import _core
from engram_server.spec import EngramSpec

TOKENS = 16_384
VOCAB_SIZE = 129_280
PAD_CLASS = 2

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384_006_168, 384_016_682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16_000_000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99_092,
    "image_token_id": 129_264,
}

Modulo = Callable[[NDArray[np.uint64], np.uint64, NDArray[np.uint64]], None]
Hash = Callable[[], NDArray[np.int64]]


def run(scale: Scale) -> Iterator[Result]:
    """hash_vs_numpy, of one sequence without images (NumPy is spared the history rule's special cases)."""
    spec = EngramSpec.from_config(CONFIG)
    rng = np.random.default_rng(0)
    token_map = rng.permutation(np.arange(VOCAB_SIZE, dtype=np.int32) % spec.compressed_vocab_size)
    tokens = rng.integers(0, spec.image_token_id, size=TOKENS, dtype=np.int32)
    rows = TOKENS * len(spec.layers) * spec.columns
    with one_core():
        native = native_hash(spec, token_map, tokens)
        name, numpy = fastest_numpy(spec, token_map, tokens, expected=native())
        sides = {"ours": lambda _: rows / seconds(native), "numpy": lambda _: rows / seconds(numpy)}
        outcomes = interleaved("hash", scale.pairs, sides)
    yield Result(
        name="hash_vs_numpy",
        what="token ids to row ids, one core",
        value=statistics.median(outcomes["ours"]),
        unit="rows/s",
        reference=statistics.median(outcomes["numpy"]),
        reference_name="fastest NumPy form",
        ratio=median_ratio(outcomes["ours"], outcomes["numpy"]),
        details={"numpy_form": name},
    )


def seconds(hash_once: Hash) -> float:
    """CPU time of one call, so that other processes do not count; the result is freed outside it."""
    begin = time.thread_time()
    result = hash_once()
    elapsed = time.thread_time() - begin
    del result
    return elapsed


def native_hash(spec: EngramSpec, token_map: NDArray[np.int32], tokens: NDArray[np.int32]) -> Hash:
    ngram_hash = _core.NgramHash(
        token_map=token_map,
        pad_class=PAD_CLASS,
        image_token_id=spec.image_token_id,
        multipliers=np.asarray(spec.multipliers, dtype=np.uint64),
        primes=np.asarray(spec.primes, dtype=np.uint64),
        offsets=np.asarray(spec.offsets, dtype=np.uint64),
    )
    lengths = np.asarray([len(tokens)], dtype=np.int64)
    history, history_lengths = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64)
    return lambda: ngram_hash.rows(tokens, lengths, history, history_lengths)[0]


# ------------------------------------------------------------------------------------------- NumPy


def fastest_numpy(
    spec: EngramSpec, token_map: NDArray[np.int32], tokens: NDArray[np.int32], expected: NDArray[np.int64]
) -> tuple[str, Hash]:
    """Try every form, check that each is exact, and keep the fastest of three runs."""
    moduli = {"%": by_remainder, "divide-multiply-subtract": by_division}
    stores = {"stored by column": False, "transposed by chunk": True}
    candidates: list[tuple[float, str, Hash]] = []
    for modulo, chunk, transposed in itertools.product(moduli, (1024, 4096, 16_384), stores):

        def form(
            modulo: Modulo = moduli[modulo], chunk: int = chunk, transposed: bool = stores[transposed]
        ) -> NDArray[np.int64]:
            return numpy_hash(spec, token_map, tokens, modulo, chunk, transposed)

        if not np.array_equal(form(), expected):
            raise AssertionError("NumPy and the native hash disagree")
        best = min(seconds(form) for _ in range(3))
        candidates.append((best, f"{modulo}, chunks of {chunk}, {transposed}", form))
    _, name, fastest = min(candidates, key=lambda candidate: candidate[0])
    return name, fastest


def numpy_hash(
    spec: EngramSpec,
    token_map: NDArray[np.int32],
    tokens: NDArray[np.int32],
    modulo: Modulo,
    chunk: int,
    transposed: bool,
) -> NDArray[np.int64]:
    """int64[T, L, C]; `chunk` tokens at a time, so that the work arrays stay in the cache."""
    look_back = spec.max_ngram_size - 1
    columns = spec.columns
    classes = np.full(look_back + len(tokens), PAD_CLASS, dtype=np.uint64)
    classes[look_back:] = token_map[tokens]
    multipliers = np.asarray(spec.multipliers, dtype=np.uint64)
    primes = np.asarray(spec.primes, dtype=np.uint64)
    offsets = np.asarray(spec.offsets, dtype=np.uint64)
    out = np.empty((len(tokens), len(spec.layers) * columns), dtype=np.uint64)
    scratch = np.empty((len(spec.layers) * columns, min(chunk, len(tokens))), dtype=np.uint64)
    for begin in range(0, len(tokens), chunk):
        end = min(begin + chunk, len(tokens))
        shifted = [classes[look_back + begin - j : look_back + end - j] for j in range(look_back + 1)]
        for layer in range(len(spec.layers)):
            mixed = shifted[0] * multipliers[layer, 0]
            for shift in range(1, look_back + 1):
                mixed ^= shifted[shift] * multipliers[layer, shift]
                for column in range((shift - 1) * spec.heads, shift * spec.heads):
                    line = scratch[layer * columns + column, : end - begin]
                    modulo(mixed, primes[layer, column], line)
                    if transposed:
                        line += offsets[layer, column]
                    else:
                        np.add(line, offsets[layer, column], out=out[begin:end, layer * columns + column])
        if transposed:
            out[begin:end] = scratch[:, : end - begin].T
    return out.view(np.int64).reshape(len(tokens), len(spec.layers), columns)


def by_remainder(r: NDArray[np.uint64], prime: np.uint64, out: NDArray[np.uint64]) -> None:
    """One hardware division per row."""
    np.remainder(r, prime, out=out)


def by_division(r: NDArray[np.uint64], prime: np.uint64, out: NDArray[np.uint64]) -> None:
    """NumPy divides by a scalar with a reciprocal, in SIMD; its remainder does not."""
    np.floor_divide(r, prime, out=out)
    np.multiply(out, prime, out=out)
    np.subtract(r, out, out=out)
