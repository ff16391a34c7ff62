"""Tables opened in every way that changes how rows reach the reader: none may change a row."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serving import until
from support.truth import IMAGE, Truth, same

from engram_client import EngramMemory
from engram_server.memory import Memory, MemoryOptions
from engram_server.tables.errors import TableError
from engram_server.tables.synth import synthesise

TOKENS = [0, 3, 17, 17, IMAGE, *range(1000, 1100), 3, 17, 17]
WAYS: dict[str, dict[str, Any]] = {
    "no cache": {"cache_bytes": 0},
    "a cache of a few sets": {"cache_bytes": 256 << 10},
    "a cache of everything": {"cache_bytes": 256 << 20},
    "one io thread": {"io_threads": 1, "cache_bytes": 0},
    "four io threads": {"io_threads": 4, "io_depth": 16, "bulk_depth": 4},
    "scales on disk": {"scales": "disk"},
    "scales in memory": {"scales": "memory"},
    "resident": {"resident": True},
    "pread": {"backend": "pread"},
    "mmap": {"backend": "mmap", "cache_bytes": 256 << 10},
    "two replicas": {"replicas": 2, "cache_bytes": 0},
}


@pytest.fixture(scope="module", params=["fp4", "fp8"])
def truth(request: pytest.FixtureRequest) -> Truth:
    return Truth(request.getfixturevalue(f"{request.param}_checkpoint"), request.param)


@pytest.fixture(scope="module")
def copies(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp("copies") / name for name in ("a", "b")]
    for path in made:
        shutil.copytree(truth.path, path)
    return made


@pytest.fixture(params=WAYS)
def memory(request: pytest.FixtureRequest, truth: Truth, copies: list[Path]) -> Iterator[EngramMemory]:
    options = dict(WAYS[request.param])
    if "replicas" in options:
        options["replicas"] = tuple(copies)
    with EngramMemory.open(truth.path, **options) as opened:
        yield opened


def test_every_row_is_exact_the_second_time_too(memory: EngramMemory, truth: Truth) -> None:
    ids = truth.ids(TOKENS, [9, -1])
    for _ in range(2):
        found = memory.lookup(TOKENS, history=[9, -1], format="packed")
        assert same(found.values, truth.values(ids, "packed"))
        for columns in ((0, 12), (6, 9), (11, 22)):
            found = memory.lookup(TOKENS, history=[9, -1], columns=columns, format="fp32")
            assert same(found.values, truth.values(ids[:, :, slice(*columns)], "fp32"))
        found = memory.lookup(TOKENS, history=[9, -1], unique=True)
        assert same(found.values, truth.values(ids, "bf16"))
        rows = [5, 0, truth.oracle.rows(14) - 1, -1, 5]
        assert same(memory.lookup_rows(14, rows).values, truth.rows(14, rows, "bf16"))


def test_resident_tables_are_read_once(truth: Truth) -> None:
    with Memory.open(truth.path, MemoryOptions(resident=True)) as memory:
        assert (memory.loads, memory.has_cache, memory.cache_state().capacity_bytes) == ("tables", False, 0)
        until(lambda: memory.load_progress()[0] == memory.load_progress()[1])
        assert memory.load_progress()[2] == ""
        with EngramMemory(memory) as embedded:
            found = embedded.lookup(TOKENS)
            assert found.stats.reads == 0
            assert same(found.values, truth.values(truth.ids(TOKENS), "bf16"))


def test_a_cache_is_described(truth: Truth) -> None:
    with EngramMemory.open(truth.path, cache_bytes=32 << 20) as memory:
        empty = memory.describe().cache
        assert 0 < empty.capacity_bytes <= 32 << 20
        assert (empty.used_bytes, empty.hits, empty.misses) == (0, 0, 0)
        for _ in range(2):
            memory.lookup(range(100, 200))
        used = memory.describe().cache
        assert (used.hits, used.misses, used.evictions) == (used.misses, used.hits, 0)
        assert used.hits == len(np.unique(truth.ids(range(100, 200)).reshape(-1, 8), axis=0))
        assert used.used_bytes > 0


def test_what_is_no_copy_is_refused(truth: Truth, tmp_path: Path) -> None:
    other_rows = synthesise(tmp_path / "rows", 2000, truth.kind, seed=99).path
    other_shape = synthesise(tmp_path / "shape", 300, truth.kind, seed=4).path
    for path, sentence in (
        (other_rows, r"rows is no copy of .*: its table of layer 1 has other rows"),
        (other_shape, r"shape is no copy of .*: its tables have another shape"),
        (tmp_path / "absent", "absent"),
    ):
        with pytest.raises((TableError, OSError), match=sentence):
            Memory.open(truth.path, MemoryOptions(replicas=(path,)))
