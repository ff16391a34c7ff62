"""The log of a server: text or JSON on stderr, and one line a minute at most for a fault that repeats."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

log = logging.getLogger("engram_server")

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
ONE_BY_ONE = {"one_by_one": True}
"""`extra=` of lines that differ in what matters: each is shown. For what comes a few times at all."""

_SHOW_EVERY_S = 60.0
_KINDS_MAX = 256
"""Kinds of lines told apart; more come only from a library that writes names into its texts."""
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "one_by_one",
    "left_out",
    "left_out_since",
}
"""What is no field that somebody gave with `extra=`."""


def level_of(name: str) -> int:
    """One of LEVELS as logging has it."""
    return logging.getLevelNamesMapping()[name.upper()]


def set_up(format: str, level: int, stream: TextIO | None = None) -> None:
    """Log to a stream (stderr) from now on, in place of where it went."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    if format == "json":  # else Python writes them, as text
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda failed: _log_uncaught(
            failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback
        )


class RepeatFilter(logging.Filter):
    """Lets one warning or error of a kind pass in a minute, and tells it how many it stands for.

    Of a kind are lines of one logger, level and template, with exceptions of one type. What a line stands for is in
    `left_out`, and since when in `left_out_since`: for formatters. Safe to share between threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[Any, ...], _Shown] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show it."""
        if record.levelno < logging.WARNING or getattr(record, "one_by_one", False):
            return True
        kind = _kind(record)
        now = self._clock()
        with self._lock:
            shown = self._kinds.get(kind)
            if shown is not None and now - shown.at < _SHOW_EVERY_S:
                shown.left_out += 1
                return False
            if shown is not None and shown.left_out:
                record.left_out, record.left_out_since = shown.left_out, shown.created
            self._kinds[kind] = _Shown(now, record.created)
            self._kinds.move_to_end(kind)
            if len(self._kinds) > _KINDS_MAX:
                self._kinds.popitem(last=False)
            return True


class _Shown:
    """The last line of a kind that was shown, and how many came after it."""

    def __init__(self, at: float, created: float) -> None:
        self.at = at
        self.created = created
        self.left_out = 0


def _kind(record: logging.LogRecord) -> tuple[Any, ...]:
    first_line, _, _ = str(record.msg).partition("\n")
    failure = record.exc_info[0] if record.exc_info else None
    # Some libraries format what they log beforehand, with the names of tasks and addresses of objects.
    return record.name, record.levelno, re.sub(r"0x[0-9a-f]+|\d+", "#", first_line), failure


class TextFormatter(logging.Formatter):
    """Time (RFC 3339, UTC), level, message; a traceback below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """As in JSON: whoever puts the logs of several machines side by side is not to ask for their time zones."""
        return _rfc3339(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, and how many like it were left out."""
        line = super().formatMessage(record)
        left_out = getattr(record, "left_out", 0)
        if not left_out:
            return line
        return f"{line} (and {left_out:,} like it since {_rfc3339(record.__dict__['left_out_since'])})"


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message; left_out and left_out_since; exception, with its
    traceback; and the fields that came with `extra=`."""

    def format(self, record: logging.LogRecord) -> str:
        """Without line breaks, in ASCII."""
        line: dict[str, Any] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _text(record.getMessage()),
        }
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
            line["left_out_since"] = _rfc3339(record.__dict__["left_out_since"])
        if record.exc_info:
            line["exception"] = _text(self.formatException(record.exc_info))
        for name, value in vars(record).items():
            if name not in _OWN and name not in line:
                line[name] = _field(value)
        return json.dumps(line)


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(text: str) -> str:
    """Names of files may be no text, and JSON must be."""
    return text.encode(errors="backslashreplace").decode()


def _field(value: Any) -> Any:
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _text(str(value))


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """A fault of ours that ends a thread, or the process."""
    log.critical("uncaught %s", kind.__name__, exc_info=(kind, error, traceback))
