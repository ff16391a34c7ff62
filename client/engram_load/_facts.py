"""What a reader needs to know of a target to trust a figure: who answered, from what, on which machine."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

from engram_client import Description
from engram_load._target import Target
from engram_server.machine import cpu_name


def facts(target: Target, description: Description) -> dict[str, Any]:
    """Of a target, for the report: plain values, by the names of docs/load.md."""
    cache = description.cache
    return {
        "name": target.name,
        "transport": target.transport,
        "format": target.format,
        "server_version": description.server_version,
        "model": description.model.model_type,
        "tables": [
            {
                "layer": table.layer,
                "rows": table.rows,
                "kind": table.kind,
                "row_bytes": table.row_bytes,
                "digest": table.digest.hex(),
                "scales": table.scales,
            }
            for table in description.tables.values()
        ],
        "backend": description.backend,
        "backend_reason": description.backend_reason,
        "backend_fallback": description.backend_fallback,
        "scales_reason": description.scales_reason,
        "cache_bytes": cache.capacity_bytes,
        "machine": None if description.machine is None else asdict(description.machine),
    }


def client_facts() -> dict[str, Any]:
    """Of the machine that the test runs on."""
    return {
        "kernel": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
