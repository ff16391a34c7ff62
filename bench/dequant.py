"""How fast do packed rows become bf16, beside memcpy into the same buffer?

`python -m bench.dequant` prints every conversion; `run` gives the one figure of `make bench`.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from bench import one_core
from bench.pairs import interleaved, median_ratio
from bench.result import Result
from bench.scale import Scale
from engram_kernels._core import (
    Format,
    RowKind,
    convert_rows,
    output_row_bytes,
    packed_row_bytes,
    simd_levels,
)

OUTPUT_BYTES = 256 << 20
"""Well beyond any cache, so that memory takes every byte."""
REPLY_BYTES = 1 << 20
"""A piece of a streamed reply."""
PAIRS = 9


def run(scale: Scale) -> Iterator[Result]:
    """dequant_vs_memcpy: FP4 to bf16, on one core."""
    size = scale.pick(OUTPUT_BYTES, REPLY_BYTES)
    with one_core():
        out = np.ones(size, dtype=np.uint8)
        source = np.ones_like(out)
        convert = _conversion(RowKind.FP4, Format.BF16, out)
        sides = {
            "ours": lambda _: size / _seconds(convert) / 1e9,
            "memcpy": lambda _: size / _seconds(lambda: np.copyto(out, source)) / 1e9,
        }
        outcomes = interleaved("dequant", scale.pairs, sides)
    yield Result(
        name="dequant_vs_memcpy",
        what=f"FP4 to bf16, one core, {size >> 20} MiB",
        value=statistics.median(outcomes["ours"]),
        unit="GB/s",
        reference=statistics.median(outcomes["memcpy"]),
        reference_name="`memcpy` of the same bytes",
        ratio=median_ratio(outcomes["ours"], outcomes["memcpy"]),
    )


def main() -> None:
    """Every conversion, level and two sizes."""
    sizes = (OUTPUT_BYTES, REPLY_BYTES)
    print(f"{'rows':5}{'to':12}{'level':8}" + "".join(f"{size >> 20:17} MiB out" for size in sizes))
    with one_core():
        memory = np.ones(OUTPUT_BYTES, dtype=np.uint8)
        for kind in RowKind:
            for fmt in Format:
                for simd in simd_levels():
                    cells = "".join(_cell(kind, fmt, memory[:size], simd) for size in sizes)
                    print(f"{kind.name:5}{fmt.name.lower():12}{simd:8}{cells}")


def _cell(kind: RowKind, fmt: Format, out: NDArray[np.uint8], simd: str) -> str:
    convert = _conversion(kind, fmt, out, simd)
    convert()
    seconds = statistics.median(_seconds(convert) for _ in range(PAIRS))
    rows = out.size // output_row_bytes(kind, fmt)
    return f"{out.size / seconds / 1e9:9.2f} GB/s{rows / seconds / 1e6:7.1f} M/s"


def _conversion(
    kind: RowKind, fmt: Format, out: NDArray[np.uint8], simd: str | None = None
) -> Callable[[], None]:
    """A call that fills `out` from as many packed rows as it holds, with the scales of ordinary rows."""
    width = output_row_bytes(kind, fmt)
    rows = out.size // width
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, size=(rows, packed_row_bytes(kind)), dtype=np.uint8)
    packed[:, -8:] = rng.integers(112, 122, size=(rows, 8))
    target = out[: rows * width].reshape(rows, width)
    return lambda: convert_rows(kind, fmt, packed, target, simd)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
