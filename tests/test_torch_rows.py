"""Rows inside a torch forward: exact over every client, asked for ahead, waited for, or an error."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.serving import ServerProcess, serving, until
from support.truth import IMAGE, Truth

from engram_client import (
    NO_RETRY,
    AsyncEngramClient,
    DeadlineError,
    Description,
    EngramClient,
    EngramError,
    EngramMemory,
    InvalidRequestError,
    Lookup,
    MismatchError,
    OverloadedError,
    UnavailableError,
)
from engram_client._query import LookupMethods, Query
from engram_client.torch import EngramRows, LayerRows, RowPrefetcher, WaitTimes
from engram_server.tables.synth import synthesise

TOKENS = [0, 3, 17, 17, IMAGE, 5, 6, *range(1000, 1030), 3, 17]
HISTORY = [9, -1, 8]
FORMS = [("bf16", False), ("bf16", True), ("packed", False), ("packed", True), ("auto", False)]


@pytest.fixture(scope="module", params=["fp4", "fp8"])
def truth(request: pytest.FixtureRequest) -> Truth:
    return Truth(request.getfixturevalue(f"{request.param}_checkpoint"), request.param)


@pytest.fixture(scope="module")
def server(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("torch-rows")
    with serving(truth.path, folder, uds=folder / "socket") as running:
        yield running


@pytest.fixture(params=["embedded", "grpc tcp", "grpc uds"])
def client(
    request: pytest.FixtureRequest, truth: Truth, server: ServerProcess
) -> Iterator[EngramClient | EngramMemory]:
    if request.param == "embedded":
        with EngramMemory.open(truth.path) as memory:
            yield memory
    else:
        with EngramClient(server.targets[request.param == "grpc uds"]) as remote:
            yield remote


@pytest.fixture
def memory(truth: Truth) -> Iterator[EngramMemory]:
    with EngramMemory.open(truth.path) as opened:
        yield opened


class Gated(LookupMethods[Lookup]):
    """A client whose lookups wait at a gate; it notes what was asked for."""

    def __init__(self, memory: EngramMemory) -> None:
        self.gate = threading.Event()
        self.asked: list[Any] = []
        self._memory = memory

    def describe(self) -> Description:
        return self._memory.describe()

    def _run(self, query: Query, timeout: float | None) -> Lookup:
        self.asked.append(query.layers)
        assert self.gate.wait(20)
        return self._memory._run(query, timeout)


@contextmanager
def gated(memory: EngramMemory, **options: Any) -> Iterator[tuple[Gated, RowPrefetcher]]:
    client = Gated(memory)
    with RowPrefetcher(client, **options) as prefetcher:  # type: ignore[arg-type]
        try:
            yield client, prefetcher
        finally:
            client.gate.set()


def bits(rows: torch.Tensor) -> np.ndarray:
    assert rows.dtype == torch.bfloat16
    return rows.view(torch.int16).numpy().view(np.uint16)


def assert_exact(found: LayerRows, truth: Truth, layer: int, ids: np.ndarray) -> None:
    """ids [T, all layers, C]"""
    np.testing.assert_array_equal(bits(found.rows), truth.values(ids, "bf16", [layer])[:, 0])


# ----------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize(("row_format", "unique"), FORMS)
def test_rows_are_the_tables_rows(
    client: EngramClient | EngramMemory, truth: Truth, row_format: Any, unique: bool
) -> None:
    ids = truth.ids(TOKENS, HISTORY)
    with RowPrefetcher(client, row_format=row_format, unique=unique) as prefetcher:
        step = prefetcher.prefetch(TOKENS, history=HISTORY)
        assert step.layers == (1, 14)
        for layer in (14, 1):
            found = step.wait(layer)
            assert_exact(found, truth, layer, ids)
            assert found.mask is not None
            assert found.mask.tolist() == [token == IMAGE for token in TOKENS]


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("row_format", ["bf16", "packed"])
def test_a_range_of_columns(
    client: EngramClient | EngramMemory, truth: Truth, row_format: Any, unique: bool
) -> None:
    ids = truth.ids(TOKENS)[:, :, 6:12]
    options: dict[str, Any] = {"columns": (6, 12), "row_format": row_format, "unique": unique}
    with RowPrefetcher(client, layers=[14], **options) as prefetcher:
        step = prefetcher.prefetch(TOKENS)
        assert step.layers == (14,)
        assert_exact(step.wait(14), truth, 14, ids)


def test_decode_steps_with_look_back_equal_one_pass(
    client: EngramClient | EngramMemory, truth: Truth
) -> None:
    """A prefill in chunks, then tokens one by one, several sequences a step."""
    sequences = [TOKENS, list(reversed(TOKENS)), [17] * len(TOKENS)]
    whole = [truth.ids(sequence) for sequence in sequences]
    with RowPrefetcher(client) as prefetcher:
        begin = 0
        for end in (7, 8, 20, 30, *range(31, len(TOKENS) + 1)):
            step = prefetcher.prefetch_batch(
                [sequence[begin:end] for sequence in sequences],
                histories=[sequence[max(0, begin - 3) : begin] for sequence in sequences],
            )
            ids = np.concatenate([part[begin:end] for part in whole])
            for layer in step.layers:
                assert_exact(step.wait(layer), truth, layer, ids)
            begin = end


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_embedding_of_row_ids(
    client: EngramClient | EngramMemory, truth: Truth, dtype: torch.dtype
) -> None:
    ids = truth.ids(TOKENS)[:, 1]
    ids[3, 5:9] = -1
    with RowPrefetcher(client) as prefetcher:
        rows = EngramRows(prefetcher, 14)
        assert (rows.num_embeddings, rows.embedding_dim) == (truth.oracle.rows(14), 256)
        assert repr(rows) == f"EngramRows(layer=14, {truth.oracle.rows(14)}, 256)"
        assert not list(rows.parameters())
        assert not rows.state_dict()
        expected = truth.rows(14, ids, "bf16")
        expected[3, 5:9] = 0
        np.testing.assert_array_equal(bits(rows(torch.from_numpy(ids).to(dtype))), expected)
        stacked = torch.from_numpy(ids[:30].reshape(5, 6, 24)).to(dtype)
        np.testing.assert_array_equal(bits(rows(stacked)).reshape(30, 24, 256), expected[:30])
        ids[2, 7] = truth.oracle.rows(14)
        with pytest.raises(InvalidRequestError, match="layer 14, position 2, column 7"):
            rows(torch.from_numpy(ids))
        with pytest.raises(InvalidRequestError, match="24 columns"):
            rows(torch.zeros(2, 23, dtype=dtype))
        with pytest.raises(ValueError, match="layer 2 has no table here; the layers served are 1, 14"):
            EngramRows(prefetcher, 2)


@pytest.mark.parametrize(("row_format", "unique"), FORMS)
def test_empty_steps(client: EngramClient | EngramMemory, row_format: Any, unique: bool) -> None:
    with RowPrefetcher(client, row_format=row_format, unique=unique) as prefetcher:
        assert prefetcher.prefetch([]).wait(1).rows.shape == (0, 24, 256)
        assert prefetcher.prefetch_blocks({}).layers == ()


# ------------------------------------------------------------------------------------------ ahead of need


def test_asking_returns_at_once_with_both_layers_under_way(memory: EngramMemory, truth: Truth) -> None:
    with gated(memory) as (client, prefetcher):
        step = prefetcher.prefetch(TOKENS)
        until(lambda: len(client.asked) == 2)
        assert client.asked == [(1,), (14,)]
        assert not step.done(1)
        client.gate.set()
        for layer in (1, 14):
            assert_exact(step.wait(layer), truth, layer, truth.ids(TOKENS))
        assert step.done(14)


def test_ids_are_copied_before_asking_returns(memory: EngramMemory, truth: Truth) -> None:
    with gated(memory) as (client, prefetcher):
        tokens, history = torch.tensor(TOKENS), np.array(HISTORY)
        blocks = torch.from_numpy(truth.ids(TOKENS)[:, 0])
        steps = [prefetcher.prefetch(tokens, history=history), prefetcher.prefetch_blocks({1: blocks})]
        for array in (tokens, history, blocks):
            array[:] = 0
        client.gate.set()
        assert_exact(steps[0].wait(1), truth, 1, truth.ids(TOKENS, HISTORY))
        assert_exact(steps[1].wait(1), truth, 1, truth.ids(TOKENS))


def test_steps_overlap_and_keep_their_own_rows(client: EngramClient | EngramMemory, truth: Truth) -> None:
    with RowPrefetcher(client) as prefetcher:
        steps = [prefetcher.prefetch(TOKENS[n:], history=TOKENS[max(0, n - 3) : n]) for n in range(10)]
        for n, step in reversed(list(enumerate(steps))):
            for layer in (14, 1, 14):
                assert_exact(step.wait(layer), truth, layer, truth.ids(TOKENS)[n:])


def test_a_wait_can_run_out_and_be_taken_up_again(memory: EngramMemory, truth: Truth) -> None:
    with gated(memory) as (client, prefetcher):
        step = prefetcher.prefetch(TOKENS)
        with pytest.raises(DeadlineError, match=r"the rows of layer 14 did not come within 0\.01 s"):
            step.wait(14, timeout=0.01)
        client.gate.set()
        assert_exact(step.wait(14), truth, 14, truth.ids(TOKENS))


def test_only_so_many_steps_at_once(memory: EngramMemory, truth: Truth) -> None:
    with gated(memory, steps_max=2) as (client, prefetcher):
        steps = [prefetcher.prefetch([n]) for n in range(2)]
        with pytest.raises(OverloadedError, match="2 steps are under way"):
            prefetcher.prefetch([2])
        client.gate.set()
        for n, step in enumerate(steps):
            assert_exact(step.wait(14), truth, 14, truth.ids([n]))
        for n in range(10):  # a step is under way until its rows are there, whoever waits for them
            assert_exact(prefetcher.prefetch([n]).wait(14), truth, 14, truth.ids([n]))


def test_a_cancelled_step_has_no_rows_and_leaves_the_next_alone(memory: EngramMemory, truth: Truth) -> None:
    with gated(memory, steps_max=2) as (client, prefetcher):
        step = prefetcher.prefetch(TOKENS)
        until(lambda: len(client.asked) == 2)
        step.cancel()
        following = prefetcher.prefetch([5, 6])
        client.gate.set()
        assert_exact(following.wait(14), truth, 14, truth.ids([5, 6]))
        for layer in (1, 14):
            with pytest.raises(EngramError, match="the step was cancelled"):
                step.wait(layer)
        for n in range(5):
            assert_exact(prefetcher.prefetch([n]).wait(14), truth, 14, truth.ids([n]))


def test_a_step_cancelled_in_time_is_never_asked_for(memory: EngramMemory) -> None:
    with gated(memory) as (client, prefetcher):
        blocking = [prefetcher.prefetch([n]) for n in range(2)]
        until(lambda: len(client.asked) == 4)  # and no thread is left for a fifth lookup
        late = prefetcher.prefetch([9])
        late.cancel()
        with pytest.raises(EngramError, match="cancelled"):
            late.wait(1)
        client.gate.set()
        for step in blocking:
            step.wait(14)
    assert len(client.asked) == 4


# --------------------------------------------------------------------------------------------- what goes wrong


def test_what_is_wrong_with_a_request_is_raised_by_wait(
    client: EngramClient | EngramMemory, truth: Truth
) -> None:
    with RowPrefetcher(client) as prefetcher:
        step = prefetcher.prefetch([5, 999_999])
        for layer in (1, 14, 1):
            with pytest.raises(InvalidRequestError, match="999999"):
                step.wait(layer)
        with pytest.raises(InvalidRequestError, match="expected integers"):
            prefetcher.prefetch(torch.tensor([0.5])).wait(1)
        with pytest.raises(InvalidRequestError, match="layer 2 was not asked for; this step has 1, 14"):
            prefetcher.prefetch([5]).wait(2)
        assert_exact(prefetcher.prefetch([5]).wait(1), truth, 1, truth.ids([5]))


def test_a_server_that_goes_away_is_an_error_and_never_old_rows(truth: Truth, tmp_path: Path) -> None:
    uds = tmp_path / "socket"
    options: dict[str, Any] = {"listen": None, "uds": uds}
    with (
        EngramClient(f"unix:{uds}", retry=NO_RETRY) as client,
        serving(truth.path, tmp_path, **options) as first,
        RowPrefetcher(client) as prefetcher,
    ):
        assert_exact(prefetcher.prefetch(TOKENS).wait(14), truth, 14, truth.ids(TOKENS))
        first.kill()
        step = prefetcher.prefetch(TOKENS)
        for layer in (1, 14):
            with pytest.raises(UnavailableError):
                step.wait(layer)
        other = synthesise(tmp_path / "other", 2000, truth.kind, seed=77).path  # type: ignore[arg-type]
        with serving(other, tmp_path, **options), pytest.raises(MismatchError, match="digest"):
            once_reached(prefetcher)
        with serving(truth.path, tmp_path, **options):
            assert_exact(once_reached(prefetcher), truth, 1, truth.ids(TOKENS))


def once_reached(prefetcher: RowPrefetcher) -> LayerRows:
    """What a step comes to when the server is there again: gRPC connects anew in its own time."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return prefetcher.prefetch(TOKENS).wait(1)
        except UnavailableError:
            if time.monotonic() > deadline:
                raise


def test_closing_leaves_nobody_waiting(memory: EngramMemory, truth: Truth) -> None:
    """Every wait ends, with the rows of its step or with an error."""
    client = Gated(memory)
    prefetcher = RowPrefetcher(client)  # type: ignore[arg-type]
    steps = [prefetcher.prefetch([n]) for n in range(8)]
    until(lambda: len(client.asked) == 4)
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    client.gate.set()
    closing.join(20)
    assert not closing.is_alive()
    for n, step in enumerate(steps):
        for layer in (1, 14):
            assert step.done(layer)
            with suppress(EngramError):
                assert_exact(step.wait(layer), truth, layer, truth.ids([n]))
    with pytest.raises(EngramError, match="the prefetcher is closed"):
        prefetcher.prefetch([1])


def test_closing_ends_a_stream_whose_server_is_gone(truth: Truth, tmp_path: Path) -> None:
    with serving(truth.path, tmp_path) as server, EngramClient(server.targets[0]) as client:
        prefetcher = RowPrefetcher(client)
        prefetcher.prefetch([5]).wait(14)
        server.kill()
        step = prefetcher.prefetch([6])
        prefetcher.close()
        for layer in (1, 14):
            assert step.done(layer)
            with pytest.raises(EngramError):
                step.wait(layer)


def test_no_server_is_an_error_at_once(tmp_path: Path) -> None:
    with EngramClient(f"unix:{tmp_path}/nobody", retry=NO_RETRY) as client, pytest.raises(UnavailableError):
        RowPrefetcher(client)


def test_a_client_that_must_be_awaited_is_refused(server: ServerProcess) -> None:
    with pytest.raises(TypeError, match="a forward does not await"):
        RowPrefetcher(AsyncEngramClient(server.targets[0]))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- how long it waited


def counts(waits: WaitTimes) -> dict[str, float]:
    return {
        sample.labels["layer"]: sample.value
        for family in waits.registry.collect()
        for sample in family.samples
        if sample.name == "engram_client_wait_seconds_count"
    }


def test_waits_are_counted_by_layer_failed_ones_too(memory: EngramMemory) -> None:
    waits = WaitTimes()
    with RowPrefetcher(memory, waits=waits) as prefetcher, RowPrefetcher(memory) as other:
        step = prefetcher.prefetch(TOKENS)
        step.wait(1)
        for _ in range(2):
            prefetcher.prefetch([5]).wait(14)
        with pytest.raises(InvalidRequestError):
            prefetcher.prefetch([999_999]).wait(14)
        EngramRows(prefetcher, 1)(torch.zeros(2, 24, dtype=torch.int64))
        other.prefetch([5]).wait(1)
    assert counts(waits) == {"1": 2, "14": 3}
    assert counts(other.waits) == {"1": 1}


def test_a_wait_takes_as_long_as_it_takes(memory: EngramMemory) -> None:
    with gated(memory) as (client, prefetcher):
        step = prefetcher.prefetch(TOKENS)
        threading.Timer(0.2, client.gate.set).start()
        step.wait(1)
        step.wait(14)
        total = prefetcher.waits.registry.get_sample_value("engram_client_wait_seconds_sum", {"layer": "1"})
        assert total is not None
        assert total > 0.1


def test_waits_are_served_in_prometheus_form(memory: EngramMemory) -> None:
    with RowPrefetcher(memory) as prefetcher:
        prefetcher.prefetch([5]).wait(1)
        port = prefetcher.waits.start_http_server(0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text = reply.read()
    assert b'engram_client_wait_seconds_bucket{layer="1",le="0.001"}' in text
    assert b"python_info" not in text
    assert b'engram_client_wait_seconds_count{layer="1"} 1.0' in prefetcher.waits.exposition()
