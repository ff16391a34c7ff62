"""Reports in files: what `--json` wrote. docs/load.md lists their fields."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engram_load._errors import LoadError

SCHEMA = "engram-load/1"


def load_document(path: Path) -> dict[str, Any]:
    """A report from its file. Raises LoadError, OSError."""
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is no report of engram-load: it is not JSON ({error})") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise LoadError(
            f"{path} is no report that this version reads: its schema is {schema!r}, expected "
            f"{SCHEMA!r} (see docs/load.md)"
        )
    return dict(document)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole, or leave what was there. Raises OSError."""
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_text(text, encoding="utf-8", errors="replace")
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
