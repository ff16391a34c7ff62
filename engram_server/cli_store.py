"""The commands about packed stores: `convert` and `verify`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

_CONVERT = """\
SRC is a checkpoint (FP4 or FP8), one of its shards, or DSV41EN1 shards. OUT is a packed store, one file that needs one
read per row and carries a checksum for each; with --to dsv41 it is a directory of shards.

  engram-server convert /models/DeepSeek-V4.1-Flash /data/flash.engram             as it is, FP4 or FP8
  engram-server convert /models/DeepSeek-V4.1-Flash /data/flash.engram --to fp4    FP8 re-quantised to half the size

Until it is whole and on disk the file is OUT.partial. After an interruption of any kind --resume goes on there."""

_VERIFY = """\
Reads the whole file at the speed of the disk: the header, the checksum of every row, all padding, the table digests.
Exit status 1 when anything is wrong, with the bad rows listed."""


def add_convert(command: Callable[..., Any]) -> None:
    """The parser of `convert`."""
    sub = command("convert", _convert, "write a packed store, or DSV41EN1 shards", _CONVERT)
    sub.add_argument(
        "source", type=Path, metavar="SRC", help="checkpoint directory, shard, or DSV41EN1 file or directory"
    )
    sub.add_argument("out", type=Path, metavar="OUT", help="file to write; for --to dsv41 a directory")
    sub.add_argument(
        "--to",
        choices=("fp4", "fp8", "dsv41"),
        help="packed rows of this kind, or DSV41EN1 shards (default: a store of the source's kind)",
    )
    sub.add_argument("--layers", type=_layers, metavar="N,...", help="tables to convert (default: all)")
    sub.add_argument(
        "--config", type=Path, metavar="FILE", help="config.json of DSV41EN1 shards (default: beside them)"
    )
    sub.add_argument("--resume", action="store_true", help="go on with an interrupted conversion")
    sub.add_argument("--force", action="store_true", help="replace OUT, or an interrupted conversion of it")
    sub.add_argument(
        "--verify",
        choices=("sample", "full", "none"),
        default="sample",
        help="read back and compare with the source, read again (default: a sample of both)",
    )
    sub.add_argument(
        "--allow-nan", action="store_true", help="take rows with NaN codes or scale byte 255 as they are"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")


def add_verify(command: Callable[..., Any]) -> None:
    """The parser of `verify`."""
    sub = command("verify", _verify, "check every row of a packed store", _VERIFY)
    sub.add_argument("store", type=Path, metavar="STORE", help="file that `convert` wrote")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _convert(options: argparse.Namespace) -> int:
    from engram_server.convert import ConvertOptions, convert
    from engram_server.convert.command import report_lines

    chosen = ConvertOptions(
        to=options.to,
        config=options.config,
        layers=options.layers,
        resume=options.resume,
        force=options.force,
        verify=options.verify,
        allow_nan=options.allow_nan,
        progress=True,
    )
    try:
        results = convert(options.source, options.out, chosen)
    except KeyboardInterrupt:
        print(
            f"engram-server convert: stopped; what was converted is kept beside {options.out}: go on with --resume",
            file=sys.stderr,
        )
        raise
    if options.json:
        print(json.dumps([asdict(result) | {"path": str(result.path)} for result in results]))
    else:
        print("\n".join(report_lines(results, chosen)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from engram_server.verify import verify

    report = verify(options.store, progress=True)
    if options.json:
        print(json.dumps(asdict(report) | {"path": str(report.path), "problems": report.problems}))
    else:
        print(f"{report.path}: {report.rows:,} rows, {report.file_bytes:,} bytes")
        for problem in report.problems:
            print(f"  PROBLEM: {problem}")
        print("  damaged" if report.problems else "  sound: header, every checksum, padding and digests")
    return 1 if report.problems else 0


def _layers(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 1,14")
    return tuple(sorted({int(part) for part in text.split(",")}))
