"""What the load commands do: options to streams, runs to a report."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram_client import CacheFacts, Description, EngramError
from engram_client._description import description_from
from engram_load._corpus import Corpus, Lengths, load_corpus, parse_lengths
from engram_load._document import Document, measured_document, nothing_answered, warnings_of
from engram_load._errors import LoadError
from engram_load._facts import client_facts, facts
from engram_load._forward import parse_forward
from engram_load._live import LiveTable
from engram_load._model import RowIds, spec_of
from engram_load._patterns import Decoding, Job, Unasked, decode, prefill, repeat, uniform, zipf
from engram_load._replay import check_tables, replayed
from engram_load._reports import SCHEMA, write_whole
from engram_load._run import Closed, Open, Plan, Recorded, Run, Stream
from engram_load._summary import summary
from engram_load._sweep import Objective, Sweep, Swept, parse_objective, parse_sweep, run_sweep
from engram_load._target import Source, Target, transport_of
from engram_server.credentials import credentials_of, refuse_credentials
from engram_server.lookup_command import tokenizer_of
from engram_server.memory import MemoryOptions
from engram_server.sizes import parse_size
from engram_server.tokens import TokenMapError
from engram_server.trace import Trace

_DURATION_S = 10.0
_RATE_MAX = 10_000.0
"""Jobs a second: Python sends fewer."""
_AT_ONCE_MAX = 4_096
"""Each is a thread."""
DRAIN_S = 60.0
"""After the end, for what has arrived."""
_EMBEDDED = ("cache_bytes", "backend", "scales", "io_depth")
"""Options of tables that are read in this process."""


@dataclass(frozen=True)
class Asked:
    """The load that a command line asks for."""

    pattern: str
    rate: float | None
    concurrency: int | None
    lengths: Lengths | None
    plan: Plan
    options: argparse.Namespace

    def with_value(self, sweep: Sweep, value: float) -> Asked:
        """At one value of a sweep."""
        if sweep.parameter == "rate":
            return replace(self, rate=value)
        if sweep.parameter == "concurrency":
            return replace(self, concurrency=int(value))
        if sweep.parameter == "cache":
            return self
        return replace(self, lengths=parse_lengths(f"{int(value)}"))

    @property
    def main(self) -> str:
        """The series that an objective means unless it names one."""
        return {"prefill": "prompt", "repeat": "prompt", "replay": "request"}.get(
            self.pattern, "step" if self.pattern in ("decode", "mix") else "request"
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there will be latencies of."""
        whole = {"decode": ("step",), "mix": ("prompt", "chunk", "step")}
        return whole.get(self.pattern, ("prompt", "chunk") if self.main == "prompt" else ("request",))

    @property
    def text(self) -> str:
        """The load in words."""
        plan = self.plan
        how = []
        if self.lengths is not None:
            how.append(f"length {self.lengths.text}")
        if self.concurrency is not None:
            how.append(f"closed loop, concurrency {self.concurrency}")
        if self.pattern == "replay" and self.concurrency is None and self.rate is None:
            how.append(f"as recorded, at {self.options.speed:g} times the speed")
        if self.rate is not None:
            how.append(f"open loop, {self.rate:g} a second (Poisson)")
        if plan.forward is not None:
            how.append(f"forwards that reach layers at {plan.forward.text}")
        if plan.duration_s is not None:
            how.append(f"{plan.duration_s:g} s")
        if plan.count is not None:
            how.append(f"{plan.count:,} jobs" if plan.duration_s is None else f"{plan.count:,} jobs at most")
        if plan.warmup_s:
            how.append(f"after {plan.warmup_s:g} s of warm-up")
        if self.options.sweep is not None:
            how.append(f"swept over {self.options.sweep}")
        return ", ".join(how)


def run_load(options: argparse.Namespace) -> int:
    """Run the test that a command line asks for, and report it. Returns 1 when its objective was not met."""
    asked = _asked(options)
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    objective = None if options.slo is None else parse_objective(options.slo)
    target = _target(options)
    _check(asked, sweep, objective, target)
    for file in filter(None, (options.json, options.html)):
        if not file.parent.is_dir():
            raise LoadError(f"cannot write {file}: there is no folder {file.parent}")
        if file.is_dir():
            raise LoadError(f"cannot write {file}: it is a folder")
    began = time.time()
    with _Bench(asked, target) as bench:
        if sweep is None:
            swept = Swept([bench.measure(asked)], None, None)
        else:
            swept = run_sweep(
                sweep,
                lambda value: bench.measure_at(sweep, value),
                None if objective is None else lambda point: objective.met(point, asked.main),
            )
        if not any(entry["jobs"] for point in swept.points for entry in point["series"].values()):
            raise LoadError(nothing_answered(swept.points))
        document = _document(asked, bench, swept, began, sweep, objective)
    return _report(document, options)


def _asked(options: argparse.Namespace) -> Asked:
    """Raises LoadError for what contradicts itself, or is no number that makes sense."""
    for name in (
        "rate",
        "concurrency",
        "count",
        "duration",
        "chunk",
        "batch",
        "steps",
        "threads",
        "speed",
        "timeout",
        "io_depth",
    ):
        value = getattr(options, name, None)
        most = {"rate": _RATE_MAX, "concurrency": _AT_ONCE_MAX, "threads": _AT_ONCE_MAX}.get(name, 1e9)
        if value is not None and not 0 < value <= most:
            raise LoadError(
                f"--{name.replace('_', '-')} is {value:g}: give a number above 0, {most:,.0f} at most"
            )
    for name, low, high in (("warmup", 0, 1e6), ("drafts", 0, 64), ("accept", 0, 1), ("skew", 0, 10)):
        value = getattr(options, name, None)
        if value is not None and not low <= value <= high:
            raise LoadError(f"--{name} is {value:g}: give a number from {low:g} to {high:g}")
    rate, concurrency = options.rate, options.concurrency
    if options.command != "mix" and rate is not None and concurrency is not None:
        raise LoadError("--rate is an open loop and --concurrency a closed one: give one of them")
    swept = (options.sweep or "").partition("=")[0]
    replay = options.command == "replay"
    if options.command == "mix" or (rate is None and swept != "rate" and not replay):
        concurrency = concurrency or 1
    duration = options.duration if options.duration or options.count or replay else _DURATION_S
    return Asked(
        pattern=options.command,
        rate=rate,
        concurrency=concurrency,
        lengths=parse_lengths(options.length) if hasattr(options, "length") else None,
        plan=Plan(
            duration,
            options.count,
            options.warmup,
            options.threads,
            drain_s=DRAIN_S,
            seed=options.seed,
            forward=parse_forward(options.forward) if getattr(options, "forward", None) else None,
        ),
        options=options,
    )


def _check(asked: Asked, sweep: Sweep | None, objective: Objective | None, target: Target) -> None:
    if target.path is None:
        for name in _EMBEDDED:
            if getattr(asked.options, name) is not None:
                raise LoadError(
                    f"--{name.replace('_', '-')} is of tables that are read in this process; {target.name} is a "
                    "server, which has its own"
                )
    if asked.pattern in ("uniform", "zipf") and not asked.options.length.isdigit():
        raise LoadError(
            f"--length {asked.options.length} is not what {asked.pattern} takes: give one number of positions"
        )
    if objective is not None:
        objective.check(asked.kinds)
    if sweep is None:
        return
    most = {"rate": _RATE_MAX, "concurrency": _AT_ONCE_MAX}.get(sweep.parameter)
    if most is not None and sweep.values[-1] > most:
        raise LoadError(
            f"--sweep {asked.options.sweep}: a {sweep.parameter} of {most:,.0f} is the most that one process tries"
        )
    if sweep.parameter == "length":
        asked.with_value(sweep, sweep.values[-1])  # says which length is none
    if sweep.parameter == "cache" and target.path is None:
        raise LoadError(
            f"--sweep cache=... opens tables anew for each size, and {target.name} is a server, whose cache was made "
            "when it started: name the path of its tables instead"
        )
    if sweep.parameter == "cache" and asked.options.cache_bytes is not None:
        raise LoadError("--sweep cache=... says the sizes of the cache: leave out --cache-bytes")
    if sweep.parameter == "length" and asked.lengths is None:
        raise LoadError(f"{asked.pattern} has no length to sweep: sweep rate or concurrency")
    if sweep.parameter == "rate" and asked.options.concurrency is not None and asked.pattern != "mix":
        raise LoadError("--sweep rate=... is an open loop, --concurrency a closed one: give one of them")
    if sweep.parameter == "concurrency" and asked.rate is not None and asked.pattern != "mix":
        raise LoadError("--sweep concurrency=... is a closed loop, --rate an open one: give one of them")
    if sweep.searched and objective is None:
        raise LoadError(
            f"--sweep {sweep.parameter}=LOW..HIGH looks for the highest that meets an objective: give --slo, or a list "
            "of values"
        )


def _target(options: argparse.Namespace) -> Target:
    given = {name: getattr(options, name) for name in _EMBEDDED if getattr(options, name) is not None}
    given["cache_bytes"] = parse_size(given.get("cache_bytes", "0"))
    memory = MemoryOptions(tokenizer=options.tokenizer, **given)
    transport = transport_of(options.target)
    if transport == "embedded":
        refuse_credentials(options, options.target)
    return Target(
        options.target,
        transport,
        memory,
        options.format,
        options.timeout,
        credentials_of(options),
    )


class _Bench:
    """An open target, and what the patterns need of it. A context manager."""

    def __init__(self, asked: Asked, target: Target) -> None:
        self.asked, self.target = asked, target
        self._opened = ExitStack()
        self._points = 0

    def __enter__(self) -> _Bench:
        self.source: Source = self._opened.enter_context(self.target.open())
        try:
            self.description: Description = self.source.describe()
            self.corpus: Corpus | None = None
            tokenizer = self._tokenizer()
            if (paths := getattr(self.asked.options, "text", None)) is not None:
                assert tokenizer is not None
                self.corpus = load_corpus(paths, tokenizer)
            self.ids = RowIds(self.description, tokenizer)
            if self.asked.plan.forward is not None:
                self.asked.plan.forward.check(tuple(self.description.tables))
            self._begin_again()
            self.trace: Trace | None = None
            if self.asked.pattern == "replay":
                self.trace = Trace(self.asked.options.trace)
                recorded = description_from(self.trace.description, str(self.trace.path))
                check_tables(recorded, self.description, self.trace.path)
        except BaseException:
            self._opened.close()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.close()

    def _begin_again(self) -> None:
        """Ask for what was asked for first."""
        self._points = 0
        if self.corpus is not None:
            self.corpus.rewind()
        tables = self.description.tables
        rows = {layer: table.rows for layer, table in tables.items()}
        self._unasked = Unasked(rows, self.description.model.columns, self.asked.plan.seed)

    def _tokenizer(self) -> Path | None:
        """Proven to be the target's. Raises TokenMapError, LoadError where one is needed and there is none."""
        needed = self.asked.pattern in ("prefill", "decode", "mix", "repeat")
        if not self.description.token_map_digest:
            if needed:
                raise LoadError(
                    f"{self.target.name} has no tokenizer and looks up row ids only: give it one, or run uniform or "
                    "zipf"
                )
            return None
        explicit = self.asked.options.tokenizer
        if not needed and explicit is None and self.asked.pattern != "replay":
            return None
        try:
            return tokenizer_of(self.source, self.target.name, explicit)
        except TokenMapError:
            if needed or explicit is not None:
                raise
            return None  # a trace can be replayed without; its distinct rows are then not known

    def measure_at(self, sweep: Sweep, value: float) -> Document:
        """One point of a sweep. One of a cache opens the tables anew, and asks it for the same again."""
        if sweep.parameter == "cache":
            self._opened.close()
            self.target = replace(self.target, memory=replace(self.target.memory, cache_bytes=int(value)))
            self.source = self._opened.enter_context(self.target.open())
            self._begin_again()
        return self.measure(self.asked.with_value(sweep, value))

    def measure(self, asked: Asked) -> Document:
        """One run. Raises LoadError when the target does not answer at its beginning."""
        before: list[CacheFacts] = []
        self._points += 1
        run = Run(self.target, self.source, self._streams(asked), asked.plan)
        if self.corpus is not None:
            self.corpus.wraps = 0
        with LiveTable(f"{asked.pattern}, {asked.text}", shown=not asked.options.quiet) as table:
            measured = run.measure(lambda: before.append(self._cache_facts()), table.update)
        gone = None
        try:
            after = self._cache_facts()
        except LoadError as error:
            after, gone = None, str(error)
        point = measured_document(measured, self.description, self.ids, before[0], after)
        point["warnings"] = warnings_of(asked.pattern, point, self._wraps())
        if gone is not None:
            point["warnings"].append(f"{gone}: this is what was measured until then")
        if self.trace is not None and self.trace.missing:
            point["warnings"].append(
                f"{self.trace.missing:,} lookups are missing in the trace: they were not recorded"
            )
        return point

    def _cache_facts(self) -> CacheFacts:
        """Raises LoadError when the target does not say."""
        try:
            return self.source.describe().cache
        except EngramError as error:
            raise LoadError(f"{self.target.name} does not answer any more ({error})") from error

    def _wraps(self) -> int:
        """How often what there is to ask for was used up."""
        if self.corpus is not None:
            return self.corpus.wraps
        return self._unasked.wraps if self.asked.pattern == "uniform" else 0

    def _streams(self, asked: Asked) -> list[Stream]:
        arrivals = Open(asked.rate) if asked.rate is not None else Closed(asked.concurrency or 1)
        if self.trace is not None:
            by_time = asked.concurrency is None and asked.rate is None
            jobs = self._shared(replayed(self.trace))
            return [
                Stream("request", "request", jobs, Recorded(asked.options.speed) if by_time else arrivals)
            ]
        match asked.pattern:
            case "prefill" | "repeat":
                return [Stream("prompt", "chunk", self._shared(self._prompts(asked)), arrivals)]
            case "decode":
                return [Stream("step", "step", self._decoding(asked), arrivals)]
            case "mix":
                prompts = Open(asked.rate) if asked.rate is not None else Closed(1)
                return [
                    Stream("prompt", "chunk", self._shared(self._prompts(asked)), prompts),
                    Stream(
                        "step", "step", self._decoding(asked), Closed(asked.concurrency or 1), background=True
                    ),
                ]
            case _:
                return [Stream("request", "request", self._shared(self._rows(asked)), arrivals)]

    @staticmethod
    def _shared(jobs: Iterator[Job]) -> Callable[[int], Iterator[Job]]:
        """One run of jobs for all loops, which take turns under a lock."""
        return lambda loop: jobs

    def _prompts(self, asked: Asked) -> Iterator[Job]:
        options, rng = asked.options, random.Random(f"{asked.plan.seed} lengths")
        look_back = self.description.model.max_ngram_size - 1
        assert asked.lengths is not None
        if asked.pattern == "repeat":
            vocab_size = self.description.model.token_vocab_size
            if not 0 <= options.token < vocab_size:
                raise LoadError(f"--token {options.token} is no token: they are 0 to {vocab_size - 1}")
            return repeat(options.token, asked.lengths, options.chunk, look_back, rng)
        assert self.corpus is not None
        if asked.lengths.largest > len(self.corpus.tokens):
            self.corpus.take(asked.lengths.largest)  # says what is missing
        return prefill(self.corpus, asked.lengths, options.chunk, look_back, rng)

    def _decoding(self, asked: Asked) -> Callable[[int], Iterator[Job]]:
        options, corpus = asked.options, self.corpus
        assert corpus is not None
        how = Decoding(options.batch, options.steps, options.drafts, options.accept)
        if len(corpus.tokens) < how.drafts + 2:
            raise LoadError(
                f"{corpus.source} has {len(corpus.tokens):,} tokens: too few to decode with {how.drafts} drafts; give "
                "more text"
            )
        look_back = self.description.model.max_ngram_size - 1
        return lambda loop: decode(corpus, how, look_back, random.Random(f"{self._seed(asked)} {loop}"))

    def _seed(self, asked: Asked) -> str:
        """Of a point of its own: one that asks for what the point before did would find it in the cache."""
        return f"{asked.plan.seed} {self._points}"

    def _rows(self, asked: Asked) -> Iterator[Job]:
        assert asked.lengths is not None
        positions = asked.lengths.largest
        if asked.pattern == "uniform":
            return uniform(self._unasked, positions)
        rng = random.Random(self._seed(asked))
        layers = list(self.description.tables)
        return zipf(spec_of(self.description), layers, positions, asked.options.skew, rng)


def _document(
    asked: Asked,
    bench: _Bench,
    swept: Swept,
    began: float,
    sweep: Sweep | None,
    objective: Objective | None,
) -> Document:
    points = swept.points
    warnings = list(dict.fromkeys(text for point in points for text in point["warnings"]))
    if swept.ended is not None:
        warnings.append(swept.ended)
    if objective is not None:
        few = [text for point in points if (text := objective.too_few(point, asked.main)) is not None]
        warnings += few[:1]
    corpus = bench.corpus
    return {
        "schema": SCHEMA,
        "label": asked.options.label,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "command": shlex.join(["engram-load", *sys.argv[1:]]),
        "target": facts(bench.target, bench.description),
        "client": client_facts(),
        "load": {
            "pattern": asked.pattern,
            "text": asked.text,
            "corpus": None if corpus is None else {"source": corpus.source, "tokens": len(corpus.tokens)},
            "seed": asked.plan.seed,
            "threads": asked.plan.threads,
        },
        "sweep": None
        if sweep is None
        else {
            "parameter": sweep.parameter,
            "objective": None if objective is None else objective.text,
            "highest": None if sweep.parameter == "cache" else swept.best,
            "lowest": swept.best if sweep.parameter == "cache" else None,
        },
        "objective": None
        if objective is None or sweep is not None
        else {"text": objective.text, "met": objective.met(points[0], asked.main)},
        "main": asked.main,
        "points": points,
        "incomplete": swept.ended is not None,
        "warnings": warnings,
    }


def _report(document: Document, options: argparse.Namespace) -> int:
    try:
        # Before anything is printed: who reads that may be gone, or the disk behind it full.
        for file, text in _files(document, options):
            write_whole(file, text)
    finally:
        print(summary(document))
    sweep, objective = document["sweep"], document["objective"]
    unmet = (objective is not None and not objective["met"]) or (
        sweep is not None and sweep["objective"] is not None and sweep["highest"] is sweep["lowest"] is None
    )
    gone = any(point["cache"]["after"] is None for point in document["points"])
    return 1 if unmet or gone or document["incomplete"] else 0


def _files(document: Document, options: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    if options.json is not None:
        yield options.json, json.dumps(document, indent=1) + "\n"
    if options.html is not None:
        from engram_load._html import page

        yield options.html, page(document)
