"""What the tests of the image share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.containers import USER, Container

from engram_server.tables.synth import synthesise


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FP4 checkpoint that everybody may read."""
    path = synthesise(tmp_path_factory.mktemp("model"), 2000, "fp4", seed=4).path
    path.chmod(0o755)
    return path


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """A folder of the image's user."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    os.chown(folder, USER, USER)
    folder.chmod(0o755)
    return folder


@pytest.fixture
def start(checkpoint: Path, sockets: Path) -> Iterator[object]:
    """Start containers that are gone after the test."""
    started = []

    def start(*options: object, serve: tuple[str, ...] = ()) -> Container:
        container = Container(sockets, f"--volume={checkpoint}:/model:ro", *options, serve=serve)
        started.append(container)
        return container

    yield start
    for container in started:
        container.remove()
