"""`python -m bench [NAME ...]`: some benchmarks, or all of them into bench/results/latest.json."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.result import Result
from bench.scale import Scale
from engram_server import __version__

RESULTS = Path(__file__).parent / "results" / "latest.json"
NEEDS_GPU = ("gpu",)
"""Run by name only."""
BENCHMARKS = (
    "hash",
    "dequant",
    "cold",
    "rivals",
    "warm",
    "text",
    "lanes",
    "shm",
    "overload",
    "rss",
    "metrics",
    "engine",
    "load",
    "convert",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them one after another: each wants the machine to itself. 0 when every one gave its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(BENCHMARKS)}; gpu"
    )
    names = parser.parse_args(arguments).names
    unknown = sorted(set(names) - {*BENCHMARKS, *NEEDS_GPU})
    if unknown:
        parser.error(
            f"there is no benchmark {unknown[0]!r}; there are {', '.join((*BENCHMARKS, *NEEDS_GPU))}"
        )
    scale = Scale.from_environment()
    results: list[Result] = []
    failures: dict[str, str] = {}
    for name in names or BENCHMARKS:
        try:
            results.extend(measured(name, scale))
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            failures[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {failures[name]}", file=sys.stderr, flush=True)
    if names or scale.quick:
        print("not written: latest.json holds whole runs at full size only")
    else:
        write(results, failures)
    return 1 if failures else 0


def measured(name: str, scale: Scale) -> Iterator[Result]:
    """Run one benchmark, with a line for each result as it comes."""
    # Imported when run: one without torch, or without the text, can still run the others.
    module = importlib.import_module(f"bench.{name}")
    begin = time.monotonic()
    print(f"{name}: {(module.__doc__ or '').partition(chr(10))[0]}", flush=True)
    for result in module.run(scale):
        print(f"  {line(result)}", flush=True)
        for key, value in result.details.items():
            print(f"      {key:40}{value if isinstance(value, str) else figure(value)}")
        yield result
    print(f"  {time.monotonic() - begin:.0f} s", flush=True)


def line(result: Result) -> str:
    """One result in words."""
    bar = (
        "" if result.bar is None else f"   {result.bar.of} {result.bar}: {'met' if result.met else 'MISSED'}"
    )
    return (
        f"{result.name:28}{figure(result.value)} {result.unit}, {result.reference_name}: "
        f"{figure(result.reference)}, ratio {result.ratio:.3f}{bar}"
    )


def figure(value: float) -> str:
    """Digits that mean something."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:,.2f}"


def write(results: Sequence[Result], failures: dict[str, str]) -> None:
    """A whole run, and what failed in it: nothing of earlier runs stays."""
    RESULTS.parent.mkdir(exist_ok=True)
    document: dict[str, Any] = {
        "version": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "kernel": platform.release()},
        "failed": failures,
        "results": [result.document() for result in results],
    }
    RESULTS.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    missed = [result.name for result in results if result.met is False]
    print(f"bars missed: {', '.join(missed) or 'none'}; written to {RESULTS}")


def _cpu() -> str:
    for entry in Path("/proc/cpuinfo").read_text().splitlines():
        if entry.startswith("model name"):
            return entry.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
