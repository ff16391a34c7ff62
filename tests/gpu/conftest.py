"""Tests that need a GPU; `make test-gpu` runs them, and nothing else does."""

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        pytest.exit(
            "these tests need a GPU that torch can use, and there is none: torch "
            f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
            returncode=1,
        )
