"""Servers that the engines' tests share."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.serving import ServerProcess, serving
from support.truth import Truth
from torch import Tensor

from engram_client import EngramClient
from engram_client.adapters import _settings


@dataclass
class Served:
    """A checkpoint, a server of it, and what its rows must be."""

    checkpoint: Path
    kind: str
    truth: Truth
    server: ServerProcess

    @property
    def target(self) -> str:
        return self.server.targets[0]

    def cached_bytes(self) -> int:
        """How much the server's row cache holds."""
        with EngramClient(self.target) as client:
            return client.describe().cache.used_bytes


def bits(rows: Tensor) -> np.ndarray:
    """uint16, of bf16 rows."""
    return rows.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.fixture(scope="session")
def fp4(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(fp4_checkpoint, tmp_path_factory.mktemp("fp4-engines")) as server:
        yield Served(fp4_checkpoint, "fp4", Truth(fp4_checkpoint, "fp4"), server)


@pytest.fixture(scope="session")
def fp8(fp8_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(fp8_checkpoint, tmp_path_factory.mktemp("fp8-engines")) as server:
        yield Served(fp8_checkpoint, "fp8", Truth(fp8_checkpoint, "fp8"), server)


@pytest.fixture(params=["fp4", "fp8"])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugins' environment is each test's own."""
    for name in ("TARGET", "WAIT_S", "LOOKUP", "PREFETCH", "PIN"):
        monkeypatch.delenv(f"ENGRAM_SERVER_{name}", raising=False)


@pytest.fixture(autouse=True)
def clients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngramClient]]:
    """Those that the plugins have made. They are closed at the end, and give their shared memory back."""
    made: list[EngramClient] = []
    use = request.getfixturevalue("transport") if "transport" in request.fixturenames else "auto"

    def make(*args: Any, **named: Any) -> EngramClient:
        made.append(EngramClient(*args, shared_memory=use, **named))
        return made[-1]

    monkeypatch.setattr(_settings, "EngramClient", make)
    yield made
    for client in made:
        client.close()


@pytest.fixture(params=["require", "off"], ids=["shared-memory", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    """How the plugins reach their server: not as they can, but as told."""
    return str(request.param)
