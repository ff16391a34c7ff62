"""What the load commands do: options to streams, runs to a report."""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram_client import CacheFacts, Description
from engram_client._description import description_from
from engram_load._corpus import Corpus, Lengths, load_corpus, parse_lengths
from engram_load._document import Document, measured_document, warnings_of
from engram_load._errors import LoadError
from engram_load._facts import client_facts, facts
from engram_load._live import LiveTable
from engram_load._model import RowIds, spec_of
from engram_load._patterns import Decoding, Job, decode, prefill, repeat, uniform, zipf
from engram_load._replay import check_tables, replayed
from engram_load._reports import SCHEMA
from engram_load._run import Closed, Open, Plan, Recorded, Run, Stream
from engram_load._summary import summary
from engram_load._sweep import Objective, Sweep, parse_objective, parse_sweep, run_sweep
from engram_load._target import Source, Target, transport_of
from engram_server.credentials import credentials_of
from engram_server.lookup_command import tokenizer_of
from engram_server.memory import MemoryOptions
from engram_server.sizes import parse_size
from engram_server.tokens import TokenMapError
from engram_server.trace import Trace

_DURATION_S = 10.0


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
        return replace(self, lengths=parse_lengths(f"{int(value)}"))

    @property
    def main(self) -> str:
        """The series that an objective means unless it names one."""
        return {"prefill": "prompt", "repeat": "prompt", "replay": "request"}.get(
            self.pattern, "step" if self.pattern in ("decode", "mix") else "request"
        )

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
        if plan.duration_s is not None:
            how.append(f"{plan.duration_s:g} s")
        elif plan.count is not None:
            how.append(f"{plan.count:,} jobs")
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
    _check(asked, sweep, objective)
    for file in filter(None, (options.json, options.html)):
        if not file.parent.is_dir():
            raise LoadError(f"cannot write {file}: there is no folder {file.parent}")
    began = time.time()
    with _Bench(asked, _target(options)) as bench:
        if sweep is None:
            points, highest = [bench.measure(asked)], None
        else:
            points, highest = run_sweep(
                sweep,
                lambda value: bench.measure(asked.with_value(sweep, value)),
                None if objective is None else lambda point: objective.met(point, asked.main),
            )
        document = _document(asked, bench, points, began, sweep, objective, highest)
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
        "io_depth",
    ):
        value = getattr(options, name, None)
        if value is not None and not 0 < value < 1e9:
            raise LoadError(f"--{name.replace('_', '-')} is {value:g}: give a number above 0")
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
        plan=Plan(duration, options.count, options.warmup, options.threads, seed=options.seed),
        options=options,
    )


def _check(asked: Asked, sweep: Sweep | None, objective: Objective | None) -> None:
    if sweep is None:
        return
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
    memory = MemoryOptions(
        backend=options.backend,
        scales=options.scales,
        tokenizer=options.tokenizer,
        io_depth=options.io_depth,
        cache_bytes=parse_size(options.cache_bytes),
    )
    return Target(
        options.target,
        transport_of(options.target),
        memory,
        options.format,
        options.timeout,
        credentials_of(options),
    )


class _Bench:
    """An open target, and what the patterns need of it. A context manager."""

    def __init__(self, asked: Asked, target: Target) -> None:
        self.asked, self.target = asked, target
        self._opened = target.open()

    def __enter__(self) -> _Bench:
        self.source: Source = self._opened.__enter__()
        try:
            self.description: Description = self.source.describe()
            self.corpus: Corpus | None = None
            tokenizer = self._tokenizer()
            if (paths := getattr(self.asked.options, "text", None)) is not None:
                assert tokenizer is not None
                self.corpus = load_corpus(paths, tokenizer)
            self.ids = RowIds(self.description, tokenizer)
            self.trace: Trace | None = None
            if self.asked.pattern == "replay":
                self.trace = Trace(self.asked.options.trace)
                recorded = description_from(self.trace.description, str(self.trace.path))
                check_tables(recorded, self.description, self.trace.path)
        except BaseException:
            self._opened.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)

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

    def measure(self, asked: Asked) -> Document:
        """One run."""
        before: list[CacheFacts] = []
        run = Run(self.target, self.source, self._streams(asked), asked.plan)
        if self.corpus is not None:
            self.corpus.wraps = 0
        with LiveTable(f"{asked.pattern}, {asked.text}", shown=not asked.options.quiet) as table:
            measured = run.measure(lambda: before.append(self.source.describe().cache), table.update)
        after = self.source.describe()
        point = measured_document(measured, self.description, self.ids, before[0], after.cache)
        point["warnings"] = warnings_of(asked.pattern, point, self.corpus.wraps if self.corpus else 0)
        if self.trace is not None and self.trace.missing:
            point["warnings"].append(
                f"{self.trace.missing:,} lookups are missing in the trace: they were not recorded"
            )
        return point

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
        options, rng = asked.options, random.Random(asked.plan.seed)
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
        look_back = self.description.model.max_ngram_size - 1
        seed = asked.plan.seed
        return lambda loop: decode(corpus, how, look_back, random.Random(seed * 1_000_003 + loop))

    def _rows(self, asked: Asked) -> Iterator[Job]:
        assert asked.lengths is not None
        rng = random.Random(asked.plan.seed)
        positions = asked.lengths.draw(rng)
        tables = self.description.tables
        if asked.pattern == "uniform":
            rows = {layer: table.rows for layer, table in tables.items()}
            return uniform(rows, self.description.model.columns, positions, asked.plan.seed)
        return zipf(spec_of(self.description), list(tables), positions, asked.options.skew, rng)


def _document(
    asked: Asked,
    bench: _Bench,
    points: list[Document],
    began: float,
    sweep: Sweep | None,
    objective: Objective | None,
    highest: float | None,
) -> Document:
    if not points:
        raise LoadError("nothing was measured")
    warnings = list(dict.fromkeys(text for point in points for text in point["warnings"]))
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
            "highest": highest,
        },
        "objective": None
        if objective is None or sweep is not None
        else {"text": objective.text, "met": objective.met(points[0], asked.main)},
        "main": asked.main,
        "points": points,
        "warnings": warnings,
    }


def _report(document: Document, options: argparse.Namespace) -> int:
    import json

    print(summary(document))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.html is not None:
        from engram_load._html import page

        options.html.write_text(page(document))
    sweep, objective = document["sweep"], document["objective"]
    unmet = (objective is not None and not objective["met"]) or (
        sweep is not None and sweep["objective"] is not None and sweep["highest"] is None
    )
    return 1 if unmet else 0
