"""The log of a server: each line an object, and a fault that repeats is one line a minute that tells how many."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from grpc_health.v1 import health
from support.faulty_fs import faulty_fs
from test_cli import engram_server, served

from engram_client import EngramClient, EngramError
from engram_server.health import Health
from engram_server.logs import ONE_BY_ONE, JsonFormatter, RepeatFilter, TextFormatter, level_of
from engram_server.shared_memory import SharedMemoryChannel


class Log:
    """What a handler with the filter writes, at a time of ours."""

    def __init__(self, formatter: logging.Formatter | None = None) -> None:
        self.now = 1000.0
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(formatter or logging.Formatter("%(levelname)s %(message)s"))
        handler.addFilter(RepeatFilter(lambda: self.now))
        self.logger = logging.Logger("a")
        self.logger.addHandler(handler)

    def lines(self) -> list[str]:
        """Since the last call."""
        written = self.stream.getvalue().splitlines()
        self.stream.seek(0)
        self.stream.truncate()
        return written


def test_a_fault_that_repeats_is_one_line_a_minute() -> None:
    log = Log(TextFormatter())
    for number in range(1205):
        log.logger.warning("row %d cannot be read", number)
        log.now += 0.049
    assert [line.partition(" WARNING ")[2] for line in log.lines()] == ["row 0 cannot be read"]
    log.now += 1
    log.logger.warning("row %d cannot be read", 7)
    (line,) = log.lines()
    assert " WARNING row 7 cannot be read (and 1,204 like it since " in line
    log.now += 60
    log.logger.warning("row %d cannot be read", 8)
    (line,) = log.lines()
    assert line.endswith("row 8 cannot be read"), "nothing was left out since"


@pytest.fixture
def far_from_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def told(line: str) -> float:
    """The time at its beginning, or at the end of what it says was left out, in seconds since the epoch."""
    (text,) = re.findall(r"(?:^|since )(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z)(?: |\)$)", line)
    return datetime.fromisoformat(text).timestamp()


def test_times_of_a_text_are_utc_wherever_it_is_written(far_from_greenwich: None) -> None:
    log = Log(TextFormatter())
    before = time.time()
    for _ in range(2):
        log.logger.warning("a fault")
    log.now += 60
    log.logger.warning("a fault")
    first, second = log.lines()
    begin, _, end = second.partition(" WARNING ")
    for text in (first, begin + " ", end):
        assert before - 0.001 <= told(text) <= time.time()


def test_every_command_logs_in_utc(fp4_checkpoint: Path, tmp_path: Path, far_from_greenwich: None) -> None:
    """One that has something to tell."""
    for file in fp4_checkpoint.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    before = time.time()
    (line,) = engram_server("lookup", tmp_path, "--rows", "1:0").stderr.splitlines()
    assert "has no tokenizer.json" in line
    assert before - 0.001 <= told(line) <= time.time()


def test_what_differs_is_shown() -> None:
    log = Log()
    other = logging.Logger("b")
    other.addHandler(log.logger.handlers[0])
    for _ in range(3):
        log.logger.warning("a fault")
        log.logger.error("a fault")
        other.error("a fault")
        log.logger.error("another fault")
        for kind in (ValueError, KeyError):
            log.logger.error("failed", exc_info=kind("x"))
    assert [line for line in log.lines() if line.startswith(("WARNING", "ERROR"))] == [
        "WARNING a fault",
        "ERROR a fault",
        "ERROR a fault",
        "ERROR another fault",
        "ERROR failed",
        "ERROR failed",
    ]
    for number in range(3):
        log.logger.info("a step")
        log.logger.warning("file %d is odd", number, extra=ONE_BY_ONE)
    assert log.lines() == ["INFO a step", "WARNING file 0 is odd"] + [
        line for number in (1, 2) for line in ("INFO a step", f"WARNING file {number} is odd")
    ]


def test_tables_that_are_damaged_again_are_told_again() -> None:
    log = Log()
    server = logging.getLogger("engram_server")
    server.addHandler(log.logger.handlers[0])

    async def damaged_twice() -> None:
        condition = Health(health.aio.HealthServicer(), ())
        condition.serving()
        condition.damaged("the first file")
        condition.serving()
        condition.damaged("the second file")
        condition.damaged("and its rows")

    try:
        asyncio.run(damaged_twice())
    finally:
        server.removeHandler(log.logger.handlers[0])
    assert [line.rpartition(": ")[2] for line in log.lines()] == ["the first file", "the second file"]


def test_who_knocks_at_shared_memory_hides_nothing_else() -> None:
    class Native:
        damage = ""

        def take_notes(self) -> list[str]:
            return [
                "process 17 (uid 1001) was not let in: 100 % no",
                "process 18 (uid 1001) was not let in: 100 % no",
                "process 19 was detached: its ring is broken",
            ]

    log = Log()
    server = logging.getLogger("engram_server")
    server.addHandler(log.logger.handlers[0])
    channel = object.__new__(SharedMemoryChannel)
    channel._native = cast(Any, Native())
    try:
        channel.look()
    finally:
        server.removeHandler(log.logger.handlers[0])
    assert log.lines() == [
        "WARNING shared memory: process 17 (uid 1001) was not let in: 100 % no",
        "WARNING shared memory: process 19 was detached: its ring is broken",
    ]


def test_texts_that_were_formatted_before_are_of_one_kind() -> None:
    log = Log()
    for number in range(5):
        log.logger.error(f"Task-{number} at 0x7f{number:04x} failed\nand {'so on' * number}")
    assert [line for line in log.lines() if line.startswith("ERROR")] == ["ERROR Task-0 at 0x7f0000 failed"]


def test_kinds_are_forgotten_before_they_are_too_many() -> None:
    log = Log()
    names = [chr(ord("a") + i // 26 % 26) + chr(ord("a") + i % 26) + "x" * (i // 676) for i in range(1000)]
    for name in names:
        log.logger.error(name)
    assert len(log.lines()) == 1000
    log.logger.error(names[-1])
    assert log.lines() == []
    log.logger.error(names[0])
    assert log.lines() == [f"ERROR {names[0]}"], "forgotten, and so told again"


def test_threads_lose_no_count() -> None:
    log = Log(JsonFormatter())

    def complain() -> None:
        for _ in range(500):
            log.logger.error("the same fault")

    threads = [threading.Thread(target=complain) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.lines()) == 1
    log.now += 60
    log.logger.error("the same fault")
    assert json.loads(log.lines()[0])["left_out"] == 8 * 500 - 1


def test_json_is_one_object_a_line_with_all_that_is_known() -> None:
    log = Log(JsonFormatter())
    before = time.time()
    try:
        raise ValueError("of\ntwo lines")
    except ValueError:
        log.logger.exception("it failed for %s", "a\nclient")
    log.logger.info(
        "\udcff.bin é", extra={"rows": 3, "path": Path("/a"), "ratio": float("nan"), "message_": None}
    )
    failed, told = (json.loads(line) for line in log.lines())
    assert failed["message"] == "it failed for a\nclient"
    assert (failed["level"], failed["logger"]) == ("error", "a")
    assert failed["exception"].startswith("Traceback (most recent call last):\n")
    assert failed["exception"].endswith("ValueError: of\ntwo lines")
    when = datetime.fromisoformat(failed["time"])
    assert failed["time"].endswith("Z")
    assert when.tzinfo == UTC
    assert before - 0.001 <= when.timestamp() <= time.time()
    del told["time"]
    assert told == {
        "level": "info",
        "logger": "a",
        "message": "\\udcff.bin é",
        "rows": 3,
        "path": "/a",
        "ratio": "nan",
        "message_": None,
    }
    log.now += 60
    log.logger.error("x")
    log.logger.error("x")
    log.now += 60
    log.logger.error("x")
    first, second = (json.loads(line) for line in log.lines())
    assert "left_out" not in first
    assert (second["left_out"], second["left_out_since"]) == (1, first["time"])


def test_levels_are_those_of_logging() -> None:
    assert [level_of(name) for name in ("debug", "info", "warning", "error")] == [10, 20, 30, 40]


@contextmanager
def logging_server(path: Path, *options: str) -> Iterator[tuple[str, Any]]:
    with served(path, "--listen", "127.0.0.1:0", "--shm", "off", "--backend", "pread", *options) as (
        line,
        process,
    ):
        yield line, process


def test_a_server_logs_each_line_as_an_object(fp4_checkpoint: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mnt"
    began = time.monotonic()
    with (
        faulty_fs(fp4_checkpoint, mounted, tmp_path / "control.json") as faults,
        logging_server(mounted, "--log-format", "json", "--scales", "disk") as (ready, process),
    ):
        assert ready.startswith("engram-server "), "for people and scripts, as ever"
        (target,) = re.findall(r" on (\S+): layer", ready)
        with EngramClient(target, shared_memory="off") as client:
            faults.set("eio")
            for row in range(200):
                with pytest.raises(EngramError):
                    client.lookup_rows(1, [row])
            faults.clear()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    lines = [json.loads(line) for line in errors.splitlines()]
    failed = [line for line in lines if line["message"].startswith("lookup failed: layer 1, row ")]
    assert failed[0]["message"].startswith("lookup failed: layer 1, row 0 could not be read")
    assert failed[0]["level"] == "error"
    assert len(failed) <= 1 + (time.monotonic() - began) // 60
    assert lines[-1]["message"] == "stopped"


def test_what_keeps_a_server_from_starting_is_an_object_too(tmp_path: Path) -> None:
    found = engram_server("serve", tmp_path / "nothing", "--log-format=json")
    assert found.returncode == 1
    assert found.stdout == ""
    line = json.loads(found.stderr)
    assert line["level"] == "critical"
    assert str(tmp_path / "nothing") in line["message"]


def test_the_least_that_is_logged_can_be_set(fp4_checkpoint: Path) -> None:
    with logging_server(fp4_checkpoint, "--log-level", "error") as (ready, process):
        assert ready
        process.terminate()
        assert process.communicate(timeout=60)[1] == ""
