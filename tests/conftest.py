"""Checkpoints that many tests read; none may write to them."""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from engram_server.tables.synth import synthesise

if "ENGRAM_TEST_GPU" not in os.environ:  # set by `make test-gpu`
    # Read when Triton is imported: its kernels are interpreted on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("engram", deadline=None)  # a busy machine is no failure
settings.load_profile("engram")

SMALL_VOCAB_SIZE = 2000
"""Tables of about 50,000 rows."""


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A program that is run in the tests' process logs to the stderr of that test, which is closed afterwards."""
    root = logging.getLogger()
    handlers, level, hooks = set(root.handlers), root.level, (sys.excepthook, threading.excepthook)
    yield
    for handler in set(root.handlers) - handlers:
        root.removeHandler(handler)
    root.setLevel(level)
    sys.excepthook, threading.excepthook = hooks


@pytest.fixture(scope="session")
def fp4_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a small FP4 checkpoint with layers 1 and 14."""
    return synthesise(tmp_path_factory.mktemp("fp4"), SMALL_VOCAB_SIZE, "fp4", seed=4).path


@pytest.fixture(scope="session")
def fp8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a small FP8 checkpoint with layers 1 and 14."""
    return synthesise(tmp_path_factory.mktemp("fp8"), SMALL_VOCAB_SIZE, "fp8", seed=8).path
