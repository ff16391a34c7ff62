"""Rows inside a torch forward: exact over every client, asked for ahead, waited for, or an error."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
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
from prometheus_client.parser import text_string_to_metric_families
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
    Retry,
    SharedMemory,
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


@pytest.fixture(params=["embedded", "grpc tcp", "grpc uds", "shared memory"])
def client(
    request: pytest.FixtureRequest, truth: Truth, server: ServerProcess
) -> Iterator[EngramClient | EngramMemory]:
    if request.param == "embedded":
        with EngramMemory.open(truth.path, cache_bytes=1 << 20) as memory:
            yield memory
    else:
        use = "require" if request.param == "shared memory" else "off"
        with EngramClient(server.targets[request.param == "grpc uds"], shared_memory=use) as remote:
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
        for shape in ([], [0, 0], [5, 0]):
            with pytest.raises(InvalidRequestError, match=r"row ids have shape .*; expected \[\.\.\., 24\]"):
                rows(torch.zeros(shape, dtype=dtype))
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


# ------------------------------------------------------------------------------------------ through shared memory


SMALL = SharedMemory("require", data_bytes=1 << 20)
"""Room for 85 tokens of one layer in bf16."""


def test_rows_leave_the_shared_memory_and_give_their_room_back(
    server: ServerProcess, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty times what fits: some waited for, some cancelled, some forgotten, all of them in place."""
    for way in ("stream", "_run"):
        monkeypatch.setattr(EngramClient, way, lambda *_: pytest.fail("not in place"))
    sequences = [[n, *range(50 + n, 79 + n)] for n in range(80)]
    with EngramClient(server.targets[1], shared_memory=SMALL) as client, RowPrefetcher(client) as prefetcher:
        kept = []
        for n, tokens in enumerate(sequences):
            step = prefetcher.prefetch(tokens)
            if n % 3 == 0:
                kept.append((tokens, step.wait(1), step.wait(14)))
            elif n % 3 == 1:
                step.cancel()
            prefetcher.prefetch(tokens[:1]).wait(14)
        for tokens, *found in kept:
            for layer, rows in zip((1, 14), found, strict=True):
                assert_exact(rows, truth, layer, truth.ids(tokens))
                assert rows.mask is not None
                assert not rows.mask.any()


@pytest.mark.parametrize(("row_format", "unique"), FORMS)
def test_a_step_larger_than_the_shared_memory(
    server: ServerProcess, truth: Truth, row_format: Any, unique: bool
) -> None:
    tokens = list(range(500))
    options: dict[str, Any] = {"row_format": row_format, "unique": unique}
    with (
        EngramClient(server.targets[1], shared_memory=SMALL) as client,
        RowPrefetcher(client, **options) as prefetcher,
    ):
        steps = [prefetcher.prefetch(tokens[n:]) for n in range(3)]
        steps.append(prefetcher.prefetch(TOKENS))
        for n, step in enumerate(steps):
            ids = truth.ids(tokens[n:] if n < 3 else TOKENS)
            for layer in (14, 1):
                assert_exact(step.wait(layer), truth, layer, ids)


def test_shared_memory_that_others_fill_leaves_steps_to_come_another_way(
    server: ServerProcess, truth: Truth
) -> None:
    with EngramClient(server.targets[1], shared_memory=SMALL) as client, RowPrefetcher(client) as prefetcher:
        with client.in_place().lookup(range(42)) as held:  # both layers: all but 16 KiB
            assert_exact(prefetcher.prefetch(TOKENS).wait(14), truth, 14, truth.ids(TOKENS))
            np.testing.assert_array_equal(held.values, truth.values(truth.ids(list(range(42))), "bf16"))
        assert_exact(prefetcher.prefetch(TOKENS).wait(14), truth, 14, truth.ids(TOKENS))


def test_steps_of_a_server_that_ends_under_load_are_exact_or_an_error(truth: Truth, tmp_path: Path) -> None:
    """Killed and started again while steps are under way, which go on by themselves."""
    uds = tmp_path / "socket"
    options: dict[str, Any] = {"listen": None, "uds": uds}
    patient = Retry(wait_for_server_s=120)
    with (
        EngramClient(f"unix:{uds}", shared_memory="require", retry=patient) as client,
        serving(truth.path, tmp_path, **options) as first,
        RowPrefetcher(client) as prefetcher,
    ):
        steps = []
        for n in range(12):
            steps.append(prefetcher.prefetch(TOKENS[n:]))
            if n == 6:
                first.kill()
        with serving(truth.path, tmp_path, **options):
            for n, step in enumerate(steps):
                for layer in (1, 14):
                    assert_exact(step.wait(layer), truth, layer, truth.ids(TOKENS[n:]))


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
        with pytest.raises(InvalidRequestError, match="ids are no array"):
            prefetcher.prefetch([[1], [2, 3]])
        with pytest.raises(InvalidRequestError, match="layer 2 was not asked for; this step has 1, 14"):
            prefetcher.prefetch([5]).wait(2)
        assert_exact(prefetcher.prefetch([5]).wait(1), truth, 1, truth.ids([5]))


@pytest.mark.parametrize("use", ["off", "require"])
def test_a_server_that_goes_away_is_an_error_and_never_old_rows(
    truth: Truth, tmp_path: Path, use: Any
) -> None:
    uds = tmp_path / "socket"
    options: dict[str, Any] = {"listen": None, "uds": uds}
    with (
        EngramClient(f"unix:{uds}", retry=NO_RETRY, shared_memory=use) as client,
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


@pytest.mark.parametrize("use", ["off", "auto"])
def test_closing_ends_lookups_whose_server_is_gone(truth: Truth, tmp_path: Path, use: Any) -> None:
    with (
        serving(truth.path, tmp_path) as server,
        EngramClient(server.targets[0], shared_memory=use) as client,
    ):
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


def test_options_that_make_no_sense_are_refused(memory: EngramMemory) -> None:
    for option, sentence in (
        ({"row_format": "fp8"}, "row_format is 'fp8'; expected one of auto, packed, bf16"),
        ({"steps_max": 0}, "steps_max is 0; at least one step must be under way"),
    ):
        with pytest.raises(ValueError, match=sentence):
            RowPrefetcher(memory, **option)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ as modules are used


def test_copies_of_a_model_share_the_prefetcher_and_files_cannot_have_it(
    memory: EngramMemory, truth: Truth
) -> None:
    with RowPrefetcher(memory) as prefetcher:
        rows = EngramRows(prefetcher, 1)
        ids = truth.ids(TOKENS)[:, 0]
        copied = copy.deepcopy(torch.nn.Sequential(rows))
        np.testing.assert_array_equal(bits(copied(torch.from_numpy(ids))), truth.rows(1, ids, "bf16"))
        with pytest.raises(TypeError, match="is threads and a connection, not data: make a new one"):
            pickle.dumps(rows)


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_compiled_and_inference_forwards_ask_anew_each_time(memory: EngramMemory, truth: Truth) -> None:
    with RowPrefetcher(memory) as prefetcher:
        rows = EngramRows(prefetcher, 1)
        compiled = torch.compile(rows, backend="eager")
        for n in range(3):
            ids = truth.ids(TOKENS[n:])[:, 0]
            for module in (rows, compiled):
                np.testing.assert_array_equal(bits(module(torch.from_numpy(ids))), truth.rows(1, ids, "bf16"))
            with torch.inference_mode():
                np.testing.assert_array_equal(bits(rows(torch.from_numpy(ids))), truth.rows(1, ids, "bf16"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_which_would_keep_the_rows_is_refused(memory: EngramMemory) -> None:
    with RowPrefetcher(memory) as prefetcher:
        rows = EngramRows(prefetcher, 1)
        with pytest.raises(RuntimeError, match="a trace records, which would use them for every step"):
            torch.jit.trace(rows, (torch.zeros(2, 24, dtype=torch.int64),))
        assert rows(torch.zeros(2, 24, dtype=torch.int64)).shape == (2, 24, 256)


def test_a_forked_child_is_refused_and_not_left_waiting(memory: EngramMemory, truth: Truth) -> None:
    with RowPrefetcher(memory) as prefetcher:
        child = os.fork()
        if child == 0:
            try:
                prefetcher.prefetch(TOKENS)
            except EngramError as error:
                os._exit(7 if "before a fork" in str(error) else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert_exact(prefetcher.prefetch(TOKENS).wait(1), truth, 1, truth.ids(TOKENS))


def test_steps_without_end_take_no_more_memory_threads_or_descriptors(
    client: EngramClient | EngramMemory,
) -> None:
    def steps(prefetcher: RowPrefetcher, count: int) -> tuple[int, int, int]:
        for n in range(count):
            step = prefetcher.prefetch([*TOKENS, n])
            if n % 5 == 0:
                step.cancel()
            else:
                step.wait(14 if n % 5 == 1 else 1)
            if n % 50 == 0:
                with pytest.raises(InvalidRequestError):
                    prefetcher.prefetch([999_999]).wait(1)
        gc.collect()
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return rss, threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    with RowPrefetcher(client) as prefetcher:
        before = steps(prefetcher, 100)
        after = steps(prefetcher, 600)
    assert after[0] - before[0] < 64 << 20, "the rows of all steps have 550 MB"
    assert after[1:] == before[1:]


def test_a_process_that_closes_nothing_ends(server: ServerProcess) -> None:
    code = (
        "import sys; from engram_client import EngramClient; from engram_client.torch import RowPrefetcher\n"
        "for use in ('off', 'require'):\n"
        "    prefetcher = RowPrefetcher(EngramClient(sys.argv[1], shared_memory=use))\n"
        "    prefetcher.prefetch([5]).wait(14)\n"
        "    prefetcher.prefetch(range(2000))"
    )
    command = [sys.executable, "-c", code, server.targets[1]]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


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
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert families.keys() == {"engram_client_wait_seconds", "engram_client_wait_seconds_created"}
    assert families["engram_client_wait_seconds"].type == "histogram"
    samples = families["engram_client_wait_seconds"].samples
    assert {sample.labels["layer"] for sample in samples} == {"1"}
    buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
    assert [sample.value for sample in buckets] == sorted(sample.value for sample in buckets)
    assert (buckets[-1].labels["le"], buckets[-1].value) == ("+Inf", 1)
    assert b'engram_client_wait_seconds_count{layer="1"} 1.0' in prefetcher.waits.exposition()
