"""Rows that are all in the cache, copied without a batch: the same rows, and nothing that a batch must do."""

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from oracles import dequant
from support.native import CODE_BYTES, PACKED, ROWS, Tables, drain

from engram_kernels import _core

PLENTY = 1 << 28
FORMATS = list(_core.Format)
ROW_BYTES = {_core.Format.BF16: 512, _core.Format.FP32: 1024, _core.Format.PACKED_FP8: 264}


@pytest.fixture(params=[_core.RowKind.FP4, _core.RowKind.FP8], ids=["fp4", "fp8"])
def tables(tmp_path: Path, request: pytest.FixtureRequest) -> Tables:
    """Two layers of random rows."""
    return Tables(tmp_path / "tables.bin", request.param)


@pytest.fixture
def fp4(tmp_path: Path) -> Tables:
    """The same, FP4 only, where the format makes no difference."""
    return Tables(tmp_path / "tables.bin", _core.RowKind.FP4)


def blocks(positions: int, seed: int = 0) -> dict[int, NDArray[np.int64]]:
    """Ids of both layers, [positions, 24]."""
    rng = np.random.default_rng(seed)
    return {layer: rng.integers(0, rows, (positions, 24)) for layer, rows in ROWS.items()}


def fetched(engine: _core.Engine, ids: dict[int, NDArray[np.int64]], columns: tuple[int, int]) -> _core.Batch:
    """A batch whose rows are in the cache now."""
    batch = engine.submit(list(ids.items()), group=8, columns=columns)
    assert batch.wait(60)
    return batch


def hits(
    engine: _core.Engine,
    ids: dict[int, NDArray[np.int64]],
    columns: tuple[int, int] = (0, 24),
    format: _core.Format = PACKED,
    misaligned: int = 0,
    group: int = 8,
) -> tuple[tuple[int, ...] | None, NDArray[np.uint8]]:
    """What copy_hits says and writes; the latter so many bytes beyond an address that 16 divides."""
    size = ROW_BYTES.get(format) or engine_row_bytes(engine)
    out = guarded(len(next(iter(ids.values()))) * len(ids) * (columns[1] - columns[0]) * size, misaligned)
    return engine.copy_hits(list(ids.items()), format, out, group=group, columns=columns), out


def guarded(size: int, misaligned: int) -> NDArray[np.uint8]:
    """Memory for rows, filled."""
    whole = np.full(size + 32, 0xAA, np.uint8)
    first = -whole.ctypes.data % 16 + misaligned
    return whole[first : first + size]


def are_hits(
    engine: _core.Engine, ids: dict[int, NDArray[np.int64]], columns: tuple[int, int] = (0, 24)
) -> bool:
    """Whether copy_hits can do it."""
    return hits(engine, ids, columns)[0] is not None


def engine_row_bytes(engine: _core.Engine) -> int:
    """Bytes of a packed row, from the size of a slot."""
    return engine.cache_stats()["slot_bytes"] // 8


@pytest.mark.parametrize("columns", [(0, 24), (0, 12), (3, 6), (21, 24), (5, 17), (7, 8)])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name.lower())
def test_copied_rows_are_those_of_a_batch(
    tables: Tables, format: _core.Format, columns: tuple[int, int]
) -> None:
    engine = tables.open(cache_bytes=PLENTY)
    ids = blocks(300)
    for rows in ids.values():
        rows[7] = -1  # zero rows need no cache
        rows[20:30] = rows[0]
    batch = fetched(engine, ids, columns)
    stats, out = hits(engine, ids, columns, format)
    assert out.tobytes() == batch.gather(0, 300, format)
    assert stats == (*batch.stats[:2], batch.stats[1], 0, 0, 0, batch.stats[6])
    engine.close()


def test_more_bytes_than_caches_hold_are_written_exactly(tables: Tables) -> None:
    engine = tables.open(cache_bytes=PLENTY)
    ids = blocks(2_048, seed=1)
    batch = fetched(engine, ids, (0, 24))
    for format in FORMATS:
        for misaligned in (0, 1, 8):
            stats, out = hits(engine, ids, format=format, misaligned=misaligned)
            assert stats is not None
            assert out.tobytes() == by_the_book(tables, ids, (0, 24), format)
        assert bytes(batch.gather(0, 2_048, format)) == by_the_book(tables, ids, (0, 24), format)
    engine.close()


def test_one_row_that_is_missing_makes_it_a_batch(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = blocks(100)
    assert not are_hits(engine, ids)
    fetched(engine, {layer: rows[:99] for layer, rows in ids.items()}, (0, 24))
    assert are_hits(engine, {layer: rows[:99] for layer, rows in ids.items()})
    assert not are_hits(engine, ids)
    # A slot that holds some of a group's rows serves these and no others.
    last = {layer: rows[99:] for layer, rows in ids.items()}
    fetched(engine, last, (0, 4))
    assert are_hits(engine, last, (0, 4))
    assert are_hits(engine, last, (1, 3))
    assert not are_hits(engine, last, (0, 5))
    engine.close()


@pytest.mark.parametrize("bad", [-1, -2, ROWS[14], 2**32 + 5, 2**62])
def test_ids_that_need_a_batch_are_left_to_it(fp4: Tables, bad: int) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = blocks(10)
    fetched(engine, ids, (0, 24))
    assert are_hits(engine, ids)
    ids[14][4, 13] = bad  # one of a group: a mixture of rows and zero rows, or no row at all
    assert not are_hits(engine, ids)
    engine.close()


def test_single_rows_are_groups_of_one(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = np.random.default_rng(2).integers(-1, ROWS[1], (500, 1))
    assert engine.submit([(1, ids)]).wait(60)
    out = np.empty(500 * 136, np.uint8)
    stats = engine.copy_hits([(1, ids)], PACKED, out)
    assert stats is not None
    assert out.tobytes() == fp4.expected(1, ids[:, 0]).tobytes()
    assert stats[6] == len(np.unique(ids[ids >= 0]))
    engine.close()


def test_without_a_cache_nothing_is_copied(fp4: Tables) -> None:
    engine = fp4.open()
    ids = np.zeros((4, 24), np.int64)
    assert engine.copy_hits([(1, ids)], PACKED, np.empty(4 * 24 * 136, np.uint8), group=8) is None
    engine.close()


def test_out_must_have_the_size_of_all_rows(fp4: Tables) -> None:
    engine = fp4.open(cache_bytes=PLENTY)
    ids = np.zeros((4, 24), np.int64)
    with pytest.raises(ValueError, match=r"out has 7 bytes; these rows need 13056"):
        engine.copy_hits([(1, ids)], PACKED, np.empty(7, np.uint8), group=8)
    # Views of one id, so large that a product of their sizes is small again.
    for endless in ((2**54, 24), (1, 135_637_824_071_393_768)):
        view = np.broadcast_to(np.full((1, 1), -1), endless)
        with pytest.raises(ValueError, match="more rows than any memory holds"):
            engine.copy_hits([(1, view)], PACKED, np.empty(832, np.uint8), group=8)
    # However many positions: without columns they have no rows.
    none = [(layer, np.broadcast_to(np.full((1, 1), -1), (2**54, 24))) for layer in ROWS]
    nothing = np.empty(0, np.uint8)
    assert engine.copy_hits(none, _core.Format.FP32, nothing, group=8, columns=(3, 3)) is None
    with pytest.raises(ValueError, match="layer 2"):
        engine.copy_hits([(2, ids)], PACKED, np.empty(7, np.uint8), group=8)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.copy_hits([(1, ids)], PACKED, np.empty(4 * 24 * 136, np.uint8), group=8)


def test_groups_of_the_same_ids_are_one_group(fp4: Tables) -> None:
    """Of which a range of columns wants these rows at one place, and those at another."""
    engine = fp4.open(cache_bytes=PLENTY)
    ids = {1: np.tile(np.arange(8), (4, 3))}
    batch = fetched(engine, ids, (5, 18))
    stats, out = hits(engine, ids, (5, 18))
    assert out.tobytes() == batch.gather(0, 4, PACKED)
    assert stats == (4 * 13, 8, 8, 0, 0, 0, 1)
    engine.close()


def asked(rng: np.random.Generator) -> tuple[dict[int, NDArray[np.int64]], tuple[int, int], int]:
    """Ids of a few n-grams, which come again and lie in strided views; with columns and group."""
    group = int(rng.choice([1, 8, 8]))
    width = 24 if group == 8 else int(rng.integers(1, 6))
    begin, end = sorted(rng.choice(width + 1, 2, replace=False).tolist())
    positions = int(rng.choice([0, 1, 3, 8, 11, 32, 70]))
    layers = rng.permutation(list(ROWS))[: rng.integers(1, 3)].tolist()
    ids = {}
    for layer in layers:
        grams = np.random.default_rng(layer).integers(0, ROWS[layer], (12, 24))
        rows = grams[rng.integers(0, 12, positions), :width]
        if rng.random() < 0.3:
            rows[rng.random(positions) < 0.2] = -1
        if rng.random() < 0.2:
            rows[rng.random(rows.shape) < 0.01] = -1
        if rng.random() < 0.3 and group == 8:
            rows[:, :begin] = rng.integers(-(2**63), 2**63 - 1, begin)
        wide = np.full((positions, 2, width + 3), ROWS[layer])
        wide[::-1, 1, 2 : 2 + width] = rows
        ids[layer] = wide[::-1, 1, 2 : 2 + width] if rng.random() < 0.5 else rows
    return ids, (begin, end), group


@pytest.mark.parametrize("sets", [1, 6, 200])
def test_whatever_is_asked_for_hits_are_the_rows_by_the_book(tables: Tables, sets: int) -> None:
    """Threads that copy, while others push groups out and extend those of which a part was read."""
    slot_bytes = 8 * (CODE_BYTES[tables.kind] + 8)
    engine = tables.open(cache_bytes=sets * (64 + 16 * (64 + slot_bytes)))
    found = [0] * 3
    wrong: list[str] = []

    def work(thread: int) -> None:
        rng = np.random.default_rng((sets, thread))
        for _ in range(150):
            ids, columns, group = asked(rng)
            format = FORMATS[rng.integers(len(FORMATS))]
            misaligned = int(rng.choice([0, 1, 4, 8, 15]))
            if rng.random() < 0.7:
                assert engine.submit(list(ids.items()), group=group, columns=columns).wait(60)
            stats, out = hits(engine, ids, columns, format, misaligned, group)
            if stats is None:
                continue
            found[thread] += stats[6]
            if out.tobytes() != by_the_book(tables, ids, columns, format):
                wrong.append(f"{format}, {columns}, {ids}")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(found) > 0
    engine.close()


def by_the_book(
    tables: Tables, ids: dict[int, NDArray[np.int64]], columns: tuple[int, int], format: _core.Format
) -> bytes:
    """What copy_hits must write, by the oracle."""
    wanted = {layer: rows[:, slice(*columns)] for layer, rows in ids.items()}
    rows = np.stack([tables.expected(layer, rows) for layer, rows in wanted.items()], axis=1)
    packed = rows.reshape(-1, rows.shape[-1])
    return dequant.convert(tables.kind.name.lower(), format.name.lower(), packed).tobytes()


def test_hits_keep_a_group_from_leaving(fp4: Tables) -> None:
    """A hit warms its group, once for each request: eviction takes what nobody asked for again."""
    one_set = 64 + 16 * (64 + 1088)
    engine = fp4.open(cache_bytes=one_set)
    kept = np.arange(8).reshape(1, 8)
    assert engine.submit([(1, kept)], group=8).wait(60)
    out = np.empty(8 * 136, np.uint8)
    assert engine.copy_hits([(1, kept)], PACKED, out, group=8) is not None
    others = np.arange(8, 8 + 15 * 8).reshape(15, 8)
    assert engine.submit([(1, others)], group=8).wait(60)
    drain(engine)  # or they might be pinned still
    more = np.arange(1_000, 1_000 + 8).reshape(1, 8)
    assert engine.submit([(1, more)], group=8).wait(60)
    assert engine.copy_hits([(1, kept)], PACKED, out, group=8) is not None
    engine.close()


def test_copies_are_exact_while_groups_come_and_go(fp4: Tables) -> None:
    """Threads that copy from a cache of a few sets, from which others push groups out meanwhile."""
    sets = 4 * (64 + 16 * (64 + 1088))
    engine = fp4.open(cache_bytes=sets)
    wrong: list[str] = []
    found = [0] * 3

    def work(thread: int) -> None:
        rng = np.random.default_rng(thread)
        pool = np.random.default_rng(9).integers(0, ROWS[1], (40, 24))
        out = np.empty((3, 24 * 136), np.uint8)
        for _ in range(600):
            ids = pool[rng.integers(0, len(pool), 3)]
            if engine.copy_hits([(1, ids)], PACKED, out.reshape(-1), group=8) is None:
                assert engine.submit([(1, ids)], group=8).wait(60)
                continue
            found[thread] += 1
            if out.tobytes() != fp4.expected(1, ids).tobytes():
                wrong.append(f"rows of {ids.tolist()}")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(found) > 0
    assert engine.cache_stats()["evictions"] > 0
    engine.close()
