"""`make demo`: the main job end to end. Tables on disk, a server process, real text over gRPC, every row checked.

The check is independent: row ids by the hash rule written out in Python integers, rows by os.pread (tests/oracles).
Then a short load test, its report as a page, and what the server's metrics say. Exit status 1 and a sentence when
anything differs.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tqdm import tqdm

from engram_client import EngramClient, Lookup
from engram_server.tables.synth import synthesise
from engram_server.tokens import encode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.truth import Truth  # noqa: E402  (the tests' oracle, which is not installed)

CHECKPOINT = ROOT / "data" / "demo"
VOCAB_SIZE = 200_000
TEXTS = ("README.md", "docs/architecture.md", "CONTRIBUTING.md", "LICENSE")
PREFILL_TOKENS = 2_048
DECODE_STEPS = 200
DECODE_BATCH = 8
START_TIMEOUT_S = 60
LOAD_S = 5
LOAD_TOKENS = 512
SOURCES = ("client", "engram_server", "tests")
"""Other text than before, so that its rows are on the disk."""
LOAD_TEXT = ROOT / "data" / "demo-text.txt"
REPORT = ROOT / "data" / "demo-report.html"
SHOWN = {
    "engram_rows_total": "rows asked for",
    "engram_row_reads_total": "reads of these from the disk",
    "engram_read_seconds": "mean of a read, ms",
}
"""Of what /metrics has."""


class DemoError(Exception):
    """The demo found something wrong. The text says what."""


def main() -> int:
    """Run it; 0 when every row was exact."""
    try:
        run()
    except DemoError as error:
        print(f"\nDEMO FAILED: {error}", file=sys.stderr)
        return 1
    return 0


def run() -> None:
    """The story, step by step."""
    say("1/6 tables", f"{CHECKPOINT.relative_to(ROOT)}, laid out like DeepSeek-V4.1-Flash, FP4, 1.3 GB")
    synthesise(CHECKPOINT, VOCAB_SIZE, "fp4", progress=True)
    text = "\n".join((ROOT / name).read_text() for name in TEXTS)
    tokens = encode(CHECKPOINT / "tokenizer.json", text)
    say(
        "2/6 text",
        f"{', '.join(TEXTS)}: {len(text):,} characters, {len(tokens):,} tokens by V4.1's tokenizer",
    )
    with server(CHECKPOINT) as (target, metrics), EngramClient(target) as client:
        about = client.describe()
        say("3/6 server", f"engram-server {about.server_version} on {target}")
        print(f"        backend {about.backend}: {about.backend_reason}")
        for layer, table in about.tables.items():
            print(
                f"        layer {layer}: {table.rows:,} {table.kind} rows, digest {table.digest.hex()[:16]}..."
            )
        prefill = look_up_prompt(client, tokens)
        decode = look_up_steps(client, tokens)
        say("5/6 check", "every row against row ids hashed in Python and rows read by os.pread")
        truth = Truth(CHECKPOINT, "fp4")
        check(truth, tokens, prefill + decode)
        say(
            "6/6 load",
            f"engram-load prefill for {LOAD_S} s: this project's sources, {LOAD_TOKENS} tokens a prompt",
        )
        load_test(target)
        show_metrics(metrics)
    print("\nAll rows are exact. The server has stopped cleanly.")
    print(f"The load test's report: {REPORT.relative_to(ROOT)}")
    print(f"Metrics were at {metrics}; for some of your own:")
    print(f"  engram-server serve {CHECKPOINT.relative_to(ROOT)} --metrics 127.0.0.1:9464")


def say(step: str, text: str) -> None:
    """One headline."""
    print(f"{step:8}  {text}", flush=True)


@contextmanager
def server(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """A server process on free ports; its address, and the URL of its metrics."""
    command = [sys.executable, "-m", "engram_server.cli", "serve", str(checkpoint), "--listen", "127.0.0.1:0"]
    command += ["--metrics", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r" on (127\.0\.0\.1:\d+).*; metrics at (http://\S+)", line)
        if found is None:
            raise DemoError("the server did not start; its own words are above")
        yield found[1], found[2]
        process.send_signal(signal.SIGTERM)
        if process.wait(START_TIMEOUT_S) != 0:
            raise DemoError(f"the server ended with status {process.returncode} instead of 0")
    finally:
        process.kill()
        process.wait()


Piece = tuple[int, Lookup]
"""Where in the text a lookup began, and its rows."""


def look_up_prompt(client: EngramClient, tokens: list[int]) -> list[Piece]:
    """The whole text, in chunks as an engine prefills them, each with the three ids before it."""
    pieces: list[Piece] = []
    begin = time.perf_counter()
    for at in range(0, len(tokens), PREFILL_TOKENS):
        history = tokens[max(0, at - 3) : at]
        found = client.lookup(tokens[at : at + PREFILL_TOKENS], history=history, format="packed")
        pieces.append((at, found))
    elapsed = time.perf_counter() - begin
    stats = [found.stats for _, found in pieces]
    rows, distinct, reads = (sum(getattr(s, name) for s in stats) for name in ("rows", "distinct", "reads"))
    say("4/6 lookup", f"prefill: {len(tokens):,} tokens in chunks of {PREFILL_TOKENS:,}")
    print(f"        {rows:,} rows asked, {distinct:,} distinct, {reads:,} reads in {elapsed:.2f} s,")
    print("        two reads a row until its scales have been loaded, then one")
    print(f"        {rows / elapsed:,.0f} rows/s, {len(tokens) / elapsed:,.0f} tokens/s")
    return pieces


def look_up_steps(client: EngramClient, tokens: list[int]) -> list[Piece]:
    """Decode steps on one open stream: a few tokens at a time."""
    pieces: list[Piece] = []
    latencies_ms = []
    places = range(3, len(tokens) - DECODE_BATCH, max(1, (len(tokens) - DECODE_BATCH - 3) // DECODE_STEPS))
    with client.stream() as stream:
        for at in islice(places, DECODE_STEPS):
            begin = time.perf_counter()
            step = tokens[at : at + DECODE_BATCH]
            found = stream.lookup(step, history=tokens[at - 3 : at], format="packed").result()
            latencies_ms.append((time.perf_counter() - begin) * 1e3)
            pieces.append((at, found))
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    print(f"        decode: {len(pieces)} steps of {DECODE_BATCH} tokens, p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    return pieces


def check(truth: Truth, tokens: list[int], pieces: list[Piece]) -> None:
    """Compare every row of every lookup."""
    ids = truth.ids(tokens)
    rows = 0
    for at, found in tqdm(pieces, desc="        checking", unit="lookup", leave=False, disable=None):
        count = len(found.values)
        expected = truth.values(ids[at : at + count], "packed")
        if not np.array_equal(found.values, expected):
            raise DemoError(first_difference(at, found.values, expected, found.layers))
        rows += expected[..., 0].size
    print(f"        {rows:,} rows compared, bit for bit")


def load_test(target: str) -> None:
    """Some prompts, and a page about them."""
    sources = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    LOAD_TEXT.write_text("\n".join(path.read_text() for path in sources))
    command = [sys.executable, "-m", "engram_load.cli", "prefill", target, str(LOAD_TEXT.relative_to(ROOT))]
    command += [
        "--length",
        str(LOAD_TOKENS),
        "--duration",
        str(LOAD_S),
        "--label",
        "Demo",
        "--quiet",
        "--html",
        str(REPORT),
    ]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode != 0:
        raise DemoError("the load test failed; its own words are above")
    for line in ran.stdout.splitlines():
        if (" in " in line and " a second, " in line) or line.startswith(("    prompt ms", "WARNING")):
            print(f"      {line}")


def show_metrics(url: str) -> None:
    """Some of what Prometheus would be shown."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        families = {family.name: family for family in text_string_to_metric_families(reply.read().decode())}
    print(f"        metrics at {url}")
    for name, words in SHOWN.items():
        samples = families[name.removesuffix("_total")].samples

        def total(suffix: str, samples: list[Sample] = samples, name: str = name) -> float:
            return sum(sample.value for sample in samples if sample.name == name + suffix)

        value = total("") if name.endswith("_total") else 1e3 * total("_sum") / total("_count")
        print(f"        {name:24}{value:>14,.{0 if value > 100 else 3}f}  {words}")


def first_difference(
    at: int, got: NDArray[np.uint8], expected: NDArray[np.uint8], layers: tuple[int, ...]
) -> str:
    """Names the first wrong row."""
    if got.shape != expected.shape:
        return f"the lookup at token {at} has shape {got.shape}, expected {expected.shape}"
    token, layer, column = np.argwhere((got != expected).any(axis=-1))[0]
    return (
        f"token {at + token}, layer {layers[layer]}, column {column}: the row served is not the table's row"
    )


if __name__ == "__main__":
    sys.exit(main())
