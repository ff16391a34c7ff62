"""The native engine: ids in, the table's own rows out; one bad id or row fails its batch and nothing else."""

import os
import select
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.native import BACKENDS, CODE_BYTES, PACKED, ROWS, Tables, drain, random_ids
from support.serving import until

from engram_kernels import _core


@pytest.fixture(params=[_core.RowKind.FP4, _core.RowKind.FP8], ids=["fp4", "fp8"])
def tables(tmp_path: Path, request: pytest.FixtureRequest) -> Tables:
    """Two layers of random rows."""
    return Tables(tmp_path / "tables.bin", request.param)


@pytest.mark.parametrize("scales", ["disk", "memory"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gathered_rows_are_the_tables_rows(tables: Tables, backend: str, scales: str) -> None:
    engine = tables.open(backend)
    if scales == "memory":
        for layer in ROWS:
            engine.load_scales(layer)
        while any(engine.scale_progress(layer)[0] < ROWS[layer] for layer in ROWS):
            time.sleep(0.001)
    # Below and above the size planned on the calling thread.
    for positions in (1, 3, 2_000):
        ids = {layer: random_ids(layer, (positions, 24), positions) for layer in ROWS}
        batch = engine.submit(list(ids.items()))
        assert batch.wait(30)
        got = np.frombuffer(batch.gather(0, positions, PACKED), np.uint8).reshape(positions, 2, 24, -1)
        for at, layer in enumerate(ROWS):
            np.testing.assert_array_equal(got[:, at], tables.expected(layer, ids[layer]))
        distinct = sum(len(np.setdiff1d(ids[layer], [-1])) for layer in ROWS)
        rows, deduplicated, cached, joined, reads, _, _ = batch.stats
        assert (rows, deduplicated, cached, joined) == (positions * 48, distinct, 0, 0)
        assert reads == distinct * (1 if scales == "memory" else 2)
    engine.close()


def test_scales_count_as_loaded_only_when_they_are(tables: Tables) -> None:
    engine = tables.open()
    assert engine.scale_progress(1) == (0, ROWS[1], "")
    engine.load_scales(1)
    engine.load_scales(1)  # asking twice changes nothing
    while engine.scale_progress(1)[0] < ROWS[1]:
        time.sleep(0.001)
    assert engine.scale_progress(14) == (0, ROWS[14], "")
    engine.close()


def test_a_scale_plane_that_cannot_be_read_leaves_lookups_on_disk(tables: Tables) -> None:
    engine = tables.open()
    size = tables.path.stat().st_size
    os.truncate(tables.path, size - ROWS[14] * 8)
    engine.load_scales(14)
    while not engine.scale_progress(14)[2]:
        time.sleep(0.001)
    loaded, _, error = engine.scale_progress(14)
    assert loaded == 0
    assert str(tables.path) in error
    assert "truncated" in error
    ids = random_ids(1, (5, 24))
    batch = engine.submit([(1, ids)])
    assert batch.wait(30)
    assert batch.gather(0, 5, PACKED) == tables.expected(1, ids).tobytes()
    engine.close()


def test_ids_may_be_strided_views_and_are_copied_at_submission(tables: Tables) -> None:
    engine = tables.open()
    whole = random_ids(14, (50, 24))
    for view in (whole[:, 3:9], whole[::-2, ::3], whole.T[:5], whole[:0], whole[:, :0]):
        batch = engine.submit([(14, view)])
        expected = tables.expected(14, view.copy()).tobytes()
        assert batch.wait(30)
        assert batch.gather(0, view.shape[0], PACKED) == expected
    mine = whole.copy()
    batch = engine.submit([(14, mine)])
    mine[:] = 0
    assert batch.wait(30)
    assert batch.gather(0, 50, PACKED) == tables.expected(14, whole).tobytes()
    engine.close()


def test_any_range_of_positions_can_be_gathered_in_any_format(tables: Tables) -> None:
    engine = tables.open()
    ids = random_ids(1, (40, 24))
    batch = engine.submit([(1, ids)])
    assert batch.wait(30)
    packed = np.ascontiguousarray(tables.expected(1, ids)).reshape(40 * 24, -1)
    for format in (PACKED, _core.Format.PACKED_FP8, _core.Format.BF16, _core.Format.FP32):
        # Conversion has its own oracle in test_dequant.py; here it says which rows went where. A zero row
        # is zero in every format.
        whole = np.zeros((len(packed), _core.output_row_bytes(tables.kind, format)), np.uint8)
        _core.convert_rows(tables.kind, format, packed, whole)
        whole[ids.reshape(-1) < 0] = 0
        for first, count in ((0, 40), (0, 0), (7, 13), (39, 1), (40, 0)):
            part = whole[first * 24 : (first + count) * 24]
            assert batch.gather(first, count, format) == part.tobytes()
            out = np.full(part.size, 0xEE, np.uint8)
            batch.gather_into(first, count, format, out)
            assert out.tobytes() == part.tobytes()
    for first, count in ((0, 41), (41, 0), (40, 1), (2**63, 1)):
        with pytest.raises(ValueError, match="of a batch of 40"):
            batch.gather(first, count, PACKED)
    with pytest.raises(ValueError, match="out has 5 bytes"):
        batch.gather_into(0, 1, PACKED, np.zeros(5, np.uint8))
    engine.close()


def test_wrong_ids_are_named_and_the_engine_goes_on(tables: Tables) -> None:
    engine = tables.open()
    ids = random_ids(14, (4, 24))
    for wrong in (ROWS[14], -2, 2**63 - 1, -(2**63)):
        bad = ids.copy()
        bad[2, 5] = wrong
        with pytest.raises(ValueError, match=rf"layer 14, position 2, column 5: row id {wrong} is out of"):
            engine.submit([(14, bad)])
    with pytest.raises(ValueError, match="layer 2 has no table here; there are 1, 14"):
        engine.submit([(2, ids)])
    with pytest.raises(ValueError, match="same shape"):
        engine.submit([(1, random_ids(1, (4, 24))), (14, ids[:3])])
    with pytest.raises(TypeError):
        engine.submit([(14, ids.astype(np.float64))])
    drain(engine)
    batch = engine.submit([(14, ids)])
    assert batch.wait(30)
    assert batch.gather(0, 4, PACKED) == tables.expected(14, ids).tobytes()
    engine.close()


def test_tables_that_do_not_fit_their_file_are_refused(tables: Tables) -> None:
    reader = _core.Reader([str(tables.path)])
    size = tables.path.stat().st_size
    code_bytes = CODE_BYTES[tables.kind]
    fits, scales = _core.Plane(0, 0, code_bytes), _core.Plane(0, 0, 8)
    for rows, codes in (
        (10, _core.Plane(0, size - 10 * code_bytes + 1, code_bytes)),
        (2**32 - 1, fits),
        (10, _core.Plane(0, 2**64 - 100, code_bytes)),
        (10, _core.Plane(0, 0, code_bytes - 1)),
    ):
        with pytest.raises(ValueError, match="layer 1: the codes plane does not fit"):
            _core.Engine(reader, [_core.Table(1, rows, tables.kind, [_core.Planes(codes, scales)])])
    for rows in (0, 2**32):
        with pytest.raises(ValueError, match=f"layer 1 has {rows} rows; expected 1 to 4294967295"):
            _core.Engine(reader, [_core.Table(1, rows, tables.kind, [_core.Planes(fits, scales)])])
    with pytest.raises(ValueError, match="layer 1 has no copy to read"):
        _core.Engine(reader, [_core.Table(1, 1, tables.kind, [])])
    with pytest.raises(ValueError, match="names file 1 of 1"):
        _core.Engine(reader, [_core.Table(1, 1, tables.kind, [_core.Planes(_core.Plane(1, 0, 256), scales)])])
    with pytest.raises(ValueError, match="layer 1 is given twice"):
        _core.Engine(reader, [_core.Table(1, 1, tables.kind, [_core.Planes(fits, scales)])] * 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_cannot_be_read_fails_its_batch_only(tables: Tables, backend: str) -> None:
    engine = tables.open(backend)
    os.truncate(tables.path, tables.path.stat().st_size - 100 * 8)  # scales of layer 14's last 100 rows
    lost = ROWS[14] - 100
    bad = engine.submit([(14, np.asarray([[5], [lost - 1], [lost + 7], [lost + 3]]))])
    good_ids = np.arange(lost, dtype=np.int64).reshape(-1, 1)
    good = engine.submit([(14, good_ids)])
    assert bad.wait(30)
    assert good.wait(30)
    for use in (bad.check, lambda: bad.gather(0, 1, PACKED)):
        with pytest.raises(_core.RowError, match=f"layer 14, row {lost + 7} could not be read") as raised:
            use()
        assert (raised.value.layer, raised.value.row) == (14, lost + 7)
        assert raised.value.error == _core.ERROR_TRUNCATED
    assert good.gather(0, lost, PACKED) == tables.expected(14, good_ids[:, 0]).tobytes()
    engine.close()


def test_the_budget_bounds_what_is_in_flight(tables: Tables) -> None:
    engine = tables.open(budget_bytes=1 << 20)
    ids = random_ids(1, (80, 24))
    held: list[_core.Batch] = []

    def submit_until_refused() -> None:
        for _ in range(1000):
            held.append(engine.submit([(1, ids)]))

    with pytest.raises(_core.OverloadedError, match="of the budget of 1048576 bytes"):
        submit_until_refused()
    assert held
    assert all(batch.wait(30) for batch in held)
    assert 0 < engine.in_flight_bytes() <= 1 << 20
    with pytest.raises(ValueError, match="cannot fit the budget"):
        engine.submit([(1, random_ids(1, (500, 24)))])
    # One id, seen so often that what it needs would wrap around 2^64 to next to nothing.
    per_id = 8 + 8 + 4 + 2 * (24 + 4) + _core.packed_row_bytes(tables.kind)
    with pytest.raises(ValueError, match="cannot fit any budget"):
        engine.submit([(1, np.broadcast_to(np.int64(3), (2**64 // per_id + 1, 1)))])
    held.clear()
    drain(engine)
    batch = engine.submit([(1, ids)])
    assert batch.wait(30)
    assert batch.gather(0, 80, PACKED) == tables.expected(1, ids).tobytes()
    engine.close()


def test_the_event_descriptor_reports_each_batch_once(tables: Tables) -> None:
    engine = tables.open()
    silent = engine.submit([(1, random_ids(1, (3, 24)))])
    batches = {b.tag: b for b in (engine.submit([(1, random_ids(1, (9, 24)))], notify=True) for _ in "abc")}
    empty = engine.submit([(1, np.full((2, 24), -1))], notify=True)  # nothing to read
    batches[empty.tag] = empty
    seen: list[int] = []
    while len(seen) < len(batches):
        assert select.select([engine.event_fd], [], [], 30)[0]
        seen += engine.completions()
    assert sorted(seen) == sorted(batches)
    assert all(batch.done for batch in batches.values())
    assert empty.gather(0, 2, PACKED) == bytes(2 * 24 * _core.packed_row_bytes(tables.kind))
    assert silent.wait(30)
    assert engine.completions() == []
    assert not select.select([engine.event_fd], [], [], 0)[0]
    engine.close()


def test_batches_outlive_their_engine_and_dropped_ones_harm_nobody(tables: Tables) -> None:
    engine = tables.open()
    ids = random_ids(1, (2_000, 24))
    for _ in range(20):
        engine.submit([(1, ids)])  # dropped while it is read
    kept = engine.submit([(1, ids)])
    engine.close()
    assert kept.done
    assert kept.gather(0, 2_000, PACKED) == tables.expected(1, ids).tobytes()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([(1, ids)])


def test_threads_may_close_an_engine_at_once(tables: Tables) -> None:
    ids = random_ids(1, (100, 24))
    for _ in range(10):
        engine = tables.open(depth=4)
        batch = engine.submit([(1, ids)])
        together = threading.Barrier(4)
        done_at_return: list[bool] = []

        def close(
            engine: _core.Engine = engine,
            batch: _core.Batch = batch,
            together: threading.Barrier = together,
            done_at_return: list[bool] = done_at_return,
        ) -> None:
            together.wait()
            engine.close()
            done_at_return.append(batch.done)

        closers = [threading.Thread(target=close, daemon=True) for _ in range(4)]
        for thread in closers:
            thread.start()
        for thread in closers:
            thread.join(30)
        assert done_at_return == [True] * 4
    with pytest.raises(RuntimeError, match="closed"):
        engine.load_scales(1)


def test_a_forked_child_gets_an_error_and_ends(tables: Tables) -> None:
    script = f"""
        import os, numpy as np
        from engram_kernels import _core
        kind = _core.{tables.kind}
        reader = _core.Reader([{str(tables.path)!r}])
        planes = _core.Planes(_core.Plane(0, 0, 256), _core.Plane(0, 0, 8))
        engine = _core.Engine(reader, [_core.Table(1, 9, kind, [planes])])
        child = os.fork()
        if child == 0:
            try:
                engine.submit([(1, np.zeros((1, 1), np.int64))])
            except RuntimeError as error:
                print(error, flush=True)
            try:
                item = [np.ones(1, dtype) for dtype in ("u4", "u8", "u4")]
                reader.read(item[0] - 1, *item[1:], np.zeros((1, 1), np.uint8))
            except RuntimeError as error:
                print(error, flush=True)
            del engine, reader
            raise SystemExit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.count("opened before a fork") == 2
    assert done.stdout.splitlines()[-1] == "5"


def test_reads_of_a_request_that_was_let_in_are_counted_to_their_end(tables: Tables) -> None:
    """However they end: read, joined, given up, failed. Else its queue would look full, or its drive slow, for ever."""
    engine = tables.open(cache_bytes=1 << 20)
    limits = _core.AdmissionLimits(rows=10**9, queue_s=1e6)
    prefill = _core.Lane.PREFILL
    admission = engine.admit(1_000_000, prefill, limits)

    def submit(seed: int) -> _core.Batch:
        ids = random_ids(14, (200, 24), seed)
        return engine.submit([(14, ids)], group=8, lane=prefill, admission=admission)

    def all_ended() -> bool:
        return engine.wait_s(prefill) == 0

    assert engine.wait_s(prefill) > 0, "nothing of it was planned"
    twice = [submit(1), submit(1)]
    for batch in twice:
        assert batch.wait(30)
        batch.check()
    del twice, batch
    assert all_ended()
    for seed in range(2, 40):
        submit(seed)  # and dropped
    until(all_ended)
    os.truncate(tables.path, 0)
    failed = submit(40)
    assert failed.wait(30)
    with pytest.raises(_core.RowError):
        failed.check()
    assert all_ended()
    assert engine.admitted_rows == 1_000_000
    # While nothing is read, the rate is what it was.
    other = engine.admit(1_000, prefill, limits)
    before = engine.wait_s(prefill)
    time.sleep(0.2)
    assert engine.wait_s(prefill) == before > 0
    other.release()
    admission.release()
    assert engine.admitted_rows == 0
    engine.close()
