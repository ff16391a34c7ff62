"""How fast do packed rows become rows on a GPU, beside a copy from device to device?

`make test-gpu` runs it; `python -m bench gpu` the same. It is not part of `make bench`, which needs no GPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from bench.pairs import interleaved, median_ratio
from bench.result import Result
from bench.scale import Scale
from engram_kernels.device import convert_rows

ROWS = 4 << 20
"""2 GiB of bf16, well beyond any cache on the GPU."""
CASES = {
    "gpu_fp4_bf16": (136, torch.bfloat16, False),
    "gpu_fp8_bf16": (264, torch.bfloat16, False),
    "gpu_fp4_packed_fp8": (136, torch.uint8, False),
    "gpu_fp4_bf16_expanded": (136, torch.bfloat16, True),
}
"""Result -> bytes of a packed row, what it becomes, whether rows come by number."""


def run(scale: Scale) -> Iterator[Result]:
    """GB/s read and written, of the kernel and of a copy of as many bytes. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no GPU here")
    rows = scale.pick(ROWS, 4096)
    for name, (width, dtype, expanded) in CASES.items():
        yield _result(name, width, dtype, expanded, rows, scale.pairs)


def _result(name: str, width: int, dtype: torch.dtype, expanded: bool, rows: int, pairs: int) -> Result:
    packed = torch.randint(0, 256, (rows, width), dtype=torch.uint8, device="cuda")
    packed[:, -8:] = torch.randint(112, 122, (rows, 8), dtype=torch.uint8, device="cuda")
    out = torch.empty(rows, 256 if dtype is torch.bfloat16 else 264, dtype=dtype, device="cuda")
    index = torch.randperm(rows, device="cuda") if expanded else None
    moved = packed.nbytes + out.nbytes + (0 if index is None else index.nbytes)
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def rate(call: Callable[[], object]) -> float:
        return moved / _seconds(call) / 1e9

    sides: dict[str, Callable[[int], float]] = {
        "ours": lambda _: rate(lambda: convert_rows(packed, out, index=index)),
        "copy": lambda _: rate(lambda: target.copy_(source)),
    }
    outcomes = interleaved(name, pairs, sides)
    kind, to = "FP4" if width == 136 else "FP8", "bf16" if dtype is torch.bfloat16 else "packed FP8"
    return Result(
        name=name,
        what=f"{kind} to {to} on {torch.cuda.get_device_name()}" + (", rows by number" if expanded else ""),
        value=statistics.median(outcomes["ours"]),
        unit="GB/s",
        reference=statistics.median(outcomes["copy"]),
        reference_name="a device copy of as many bytes",
        ratio=median_ratio(outcomes["ours"], outcomes["copy"]),
        details={"million rows a second": rows * statistics.median(outcomes["ours"]) * 1e3 / moved},
    )


def _seconds(call: Callable[[], object]) -> float:
    """Of one call on the device, the fastest of a few after one that compiles."""
    call()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def main() -> int:
    """Print every case; 1 without a GPU."""
    from bench.__main__ import main as bench

    return bench(["gpu"])


if __name__ == "__main__":
    sys.exit(main())
