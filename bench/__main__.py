"""`python -m bench`: every benchmark, a table on stdout, and bench/results/latest.json."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import cold, dequant, hash
from engram_server import __version__

RESULTS = Path(__file__).parent / "results" / "latest.json"


def main() -> None:
    """Run them one after another: each wants the machine to itself."""
    results: list[dict[str, Any]] = [hash.run(), dequant.run(), *cold.run()]
    RESULTS.parent.mkdir(exist_ok=True)
    document = {
        "version": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu(), "kernel": platform.release()},
        "results": results,
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{'':22}{'figure':>18}{'reference':>18}  {'ratio':>6}")
    for result in results:
        print(
            f"{result['name']:22}{_figure(result['value']):>18}{_figure(result['reference']):>18}  "
            f"{result['ratio']:6.2f}  {result['unit']}; reference: {result['reference_name']}"
        )
    print(f"written to {RESULTS}")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.2f}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
