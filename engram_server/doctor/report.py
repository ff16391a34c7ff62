"""The doctor's report: examine a machine and a path, say it in text or JSON, and judge."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engram_server.doctor.depth import DEPTHS, SECONDS, DepthPoint, explain_depth, knee_of, sweep
from engram_server.doctor.finding import Finding, size_text
from engram_server.doctor.reads import (
    Reads,
    Target,
    examine_reads,
    explain_backends,
    explain_reads,
    find_target,
    is_mostly_holes,
    plain_target,
)
from engram_server.doctor.storage import explain_storage, find_device, find_mount
from engram_server.doctor.system import examine_system, explain_system
from engram_server.memory import MemoryOptions

Report = dict[str, Any]

GOOD, UNREADABLE, DEGRADED = 0, 1, 2
"""Exit statuses: io_uring and direct reads; cannot be read or served; works, but by a fallback."""

_SMALL_BYTES = 1 << 30
_WIDTH = 100
_MARKS = {"ok": "ok", "note": "note", "degraded": "WARN", "error": "FAIL"}


def examine(
    path: Path | None = None,
    *,
    depths: Sequence[int] = DEPTHS,
    seconds: float = SECONDS,
    progress: bool = False,
) -> Report:
    """Examine this machine and, with a path, what it takes to read there. The report is ready for json.dumps.

    `path` is a checkpoint directory, a shard, or any regular file. Random rows are read for `seconds` at each
    of `depths`, not at all when it is 0. Nothing is written.

    `sections` hold findings (topic, level, text, advice) for people. `system`, `storage`, `reads` and
    `depths` hold the facts behind them, as far as they were found. `io_depth` is the depth to serve with,
    null when it was not measured; `verdict` a sentence; `status` GOOD, UNREADABLE or DEGRADED. Never raises
    for what it finds.
    """
    report: Report = {"path": None if path is None else str(path), "sections": [], "io_depth": None}
    target: Target | None = None
    about_path: list[Finding] = []
    if path is not None:
        try:
            target, about_path = find_target(path)
        except OSError as error:
            advice = "name a checkpoint directory, one of its shards, or any file on the disk in question"
            problem = f"{path} cannot be read: {error.strerror or error}"
            _add(report, "path", [Finding("path", "error", problem, advice)])
            return _judged(report)
    system = examine_system()
    report["system"] = asdict(system)
    _add(report, "system", explain_system(system))
    if path is None:
        _add_own_reads(report)
    else:
        _add(report, "path", about_path)
        _add_storage(report, target.files if target else (path,))
        if target is not None:
            _add_reads(report, target, depths, seconds, progress)
    return _judged(report)


def format_report(report: Report) -> str:
    """The report as text for a terminal, at most 100 columns wide but for long paths."""
    lines = [f"engram-server doctor {report['path'] or ''}".rstrip()]
    for section in report["sections"]:
        lines += ["", section["title"]]
        if section["title"] == "depth" and report["io_depth"]:
            lines += _depth_table(report["depths"], report["io_depth"])
        for finding in section["findings"]:
            lines += _finding_lines(finding)
    return "\n".join([*lines, "", *textwrap.wrap(report["verdict"], _WIDTH, **_WRAP)])


def run(path: Path | None, *, as_json: bool = False, seconds: float = SECONDS) -> int:
    """The command: print the report, return the exit status. A progress bar goes to a terminal's stderr."""
    report = examine(path, seconds=seconds, progress=True)
    print(json.dumps(report, indent=2) if as_json else format_report(report))
    status: int = report["status"]
    return status


def _add(report: Report, title: str, findings: Iterable[Finding]) -> None:
    report["sections"].append({"title": title, "findings": [asdict(finding) for finding in findings]})


def _add_storage(report: Report, files: Sequence[Path]) -> None:
    """The file system and device of each place that files lie on."""
    places = {file.stat().st_dev: file for file in reversed(files)}
    report["storage"] = []
    findings: list[Finding] = []
    for file in reversed(places.values()):
        mount = find_mount(file)
        device = find_device(file, mount)
        report["storage"].append(
            {
                "file": str(file),
                "mount": asdict(mount) if mount else None,
                "device": asdict(device) if device else None,
            }
        )
        findings += explain_storage(mount, device)
    _add(report, "storage", findings)


def _add_reads(report: Report, target: Target, depths: Sequence[int], seconds: float, progress: bool) -> None:
    try:
        reads = examine_reads(target, MemoryOptions().io_depth)
    except (OSError, RuntimeError) as error:
        _add(report, "reads", [Finding("reads", "error", str(error))])
        return
    report["reads"] = asdict(reads)
    _add(report, "reads", explain_reads(reads, target.row_bytes))
    if seconds <= 0:
        return
    findings = list(_before_measuring(target, reads))
    if not any(finding.topic == "holes" for finding in findings):
        try:
            points = sweep(target, reads.backend, depths, seconds, progress)
        except OSError as error:
            findings.append(Finding("reads", "error", str(error), "look for the disk in the kernel log"))
        else:
            report["depths"] = [_point(point) for point in points]
            report["io_depth"] = knee_of(points).depth
            findings += explain_depth(points, target.reads_per_token, MemoryOptions().io_depth)
    _add(report, "depth", findings)


def _add_own_reads(report: Report) -> None:
    """Without a path, reads are proved on a file that is there for certain: this one."""
    file = Path(__file__)
    reads = examine_reads(plain_target(file), MemoryOptions().io_depth)
    report["reads"] = asdict(reads)
    which = Finding("file", "ok", f"no path was given, so test reads are of {file}")
    _add(report, "reads", [which, *explain_backends(reads)])


def _before_measuring(target: Target, reads: Reads) -> Iterable[Finding]:
    """What makes figures from these files worth less, or nothing."""
    if sparse := [str(file) for file in target.files if is_mostly_holes(file)]:
        yield Finding(
            "holes",
            "note",
            f"not measured: most of {' and '.join(sparse)} was never written, and reading holes asks no disk",
            "measure on a file with data: a real shard, or engram-server synth without --sparse",
        )
        return
    if target.size_bytes < _SMALL_BYTES:
        yield Finding(
            "size",
            "note",
            f"{size_text(target.size_bytes)} is little: the caches of a disk or hypervisor may hold it and "
            "flatter the figures",
            "measure on the real tables",
        )
    if not all(file.direct for file in reads.files):
        yield Finding("cache", "note", "buffered reads: what the page cache holds is faster than the disk")


def _point(point: DepthPoint) -> dict[str, Any]:
    return {
        "depth": point.depth,
        "reads_per_s": point.reads_per_s,
        "latency_ms": point.latency_s * 1e3,
        "rates": point.rates,
    }


def _judged(report: Report) -> Report:
    """With `status` and `verdict` from what was found."""
    findings = [finding for section in report["sections"] for finding in section["findings"]]
    topics = {
        level: list(dict.fromkeys(finding["topic"] for finding in findings if finding["level"] == level))
        for level in ("error", "degraded", "note")
    }
    if topics["error"]:
        report["status"] = UNREADABLE
        report["verdict"] = f"Cannot be served as it is: see FAIL above ({', '.join(topics['error'])})."
    elif topics["degraded"]:
        report["status"] = DEGRADED
        report["verdict"] = f"Works, but degraded: see WARN above ({', '.join(topics['degraded'])})."
    elif report["path"] is None or "reads" not in report:
        report["status"] = GOOD
        report["verdict"] = "Good: io_uring works. Name a path with data to examine its file system and disk."
    else:
        report["status"] = GOOD
        depth = report["io_depth"]
        advice = f" Serve with --io-depth {depth}." if depth else ""
        if "spread" in topics["note"]:
            advice = f" {depth} looked like the depth to serve with, but the rounds disagree: measure again when idle."
        report["verdict"] = "Good: io_uring with direct reads." + advice
    return report


def _finding_lines(finding: dict[str, str]) -> list[str]:
    head = f"  {_MARKS[finding['level']]:4}  {finding['topic']:11}  "
    lines = _wrapped(head, finding["text"])
    return lines + (_wrapped(" " * (len(head) - 3) + "-> ", finding["advice"]) if finding["advice"] else [])


# Paths and commands stay whole, so that they can be copied.
_WRAP: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), **_WRAP)


def _depth_table(points: Sequence[dict[str, Any]], knee: int) -> list[str]:
    """A line for each depth, its bar as long as its rate."""
    best = max(point["reads_per_s"] for point in points)
    lines = [f"{'in flight':>15}  {'reads/s':>9}  {'mean latency':>12}"]
    for point in points:
        bar = "#" * round(40 * point["reads_per_s"] / best)
        mark = " <- knee" if point["depth"] == knee else ""
        rate, latency = f"{point['reads_per_s']:,.0f}", f"{point['latency_ms']:.3f} ms"
        lines.append(f"{point['depth']:>15}  {rate:>9}  {latency:>12}  {bar}{mark}")
    return lines
