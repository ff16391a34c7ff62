"""Server and torch adapter with a GPU: pinned memory, streams, events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.serving import serving
from support.truth import Truth

from engram_client import EngramClient, EngramMemory
from engram_client.torch import EngramRows, RowPrefetcher
from engram_kernels import _core, staging
from engram_server.device import open_converter

TOKENS = [0, 3, 17, 17, 129264, *range(1000, 3000)]


@pytest.fixture(scope="module", params=["fp4", "fp8"])
def truth(request: pytest.FixtureRequest) -> Truth:
    return Truth(request.getfixturevalue(f"{request.param}_checkpoint"), request.param)


@pytest.fixture
def memory(truth: Truth) -> Iterator[EngramMemory]:
    with EngramMemory.open(truth.path) as opened:
        yield opened


def bits(rows: torch.Tensor) -> np.ndarray:
    return rows.cpu().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("row_format", ["auto", "packed", "bf16"])
def test_rows_on_the_gpu_are_the_tables_rows(
    memory: EngramMemory, truth: Truth, row_format: Any, unique: bool
) -> None:
    ids = truth.ids(TOKENS)
    with RowPrefetcher(memory, device="cuda", row_format=row_format, unique=unique) as prefetcher:
        steps = [prefetcher.prefetch(TOKENS) for _ in range(3)]
        for step in steps:
            for layer in (1, 14):
                rows, mask = step.wait(layer)
                assert rows.is_cuda
                assert mask is not None
                assert mask.sum() == 1
                np.testing.assert_array_equal(bits(rows), truth.values(ids, "bf16", [layer])[:, 0])


def test_memory_of_rows_is_not_reused_while_a_stream_reads_them(memory: EngramMemory, truth: Truth) -> None:
    expected = truth.values(truth.ids(TOKENS), "bf16", [1])[:, 0]
    with RowPrefetcher(memory, device="cuda") as prefetcher:
        copies = []
        for _ in range(20):
            rows, _ = prefetcher.prefetch(TOKENS).wait(1)
            torch.cuda._sleep(20_000_000)  # the stream lags behind
            copies.append(rows.clone())
            del rows
        for copy in copies:
            np.testing.assert_array_equal(bits(copy), expected)


def test_an_embedding_of_ids_that_are_on_the_gpu(memory: EngramMemory, truth: Truth) -> None:
    ids = truth.ids(TOKENS)[:, 1]
    with RowPrefetcher(memory, device="cuda") as prefetcher:
        rows = EngramRows(prefetcher, 14)(torch.from_numpy(ids).cuda())
    np.testing.assert_array_equal(bits(rows), truth.rows(14, ids, "bf16"))


@pytest.mark.parametrize("row_format", ["packed", "bf16"])
def test_rows_go_from_registered_shared_memory_to_the_gpu(
    truth: Truth, tmp_path: Path, row_format: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ids = truth.ids(TOKENS)
    with (
        serving(truth.path, tmp_path) as server,
        EngramClient(server.targets[0], shared_memory="require") as client,
        RowPrefetcher(client, device="cuda", row_format=row_format) as prefetcher,
    ):
        for step in [prefetcher.prefetch(TOKENS) for _ in range(3)]:
            for layer in (1, 14):
                rows, _ = step.wait(layer)
                np.testing.assert_array_equal(bits(rows), truth.values(ids, "bf16", [layer])[:, 0])
        buffer = client.in_place().lookup([5]).buffer
        assert buffer is not None
        assert torch.from_numpy(buffer).is_pinned()
    assert "CUDA does not take" not in caplog.text
    assert not torch.from_numpy(buffer).is_pinned()


def test_memory_that_cuda_refuses_leaves_no_error_behind() -> None:
    nothing = np.zeros(0, dtype=np.uint8)
    assert not staging.registered(nothing, torch.device("cuda")).known
    assert torch.zeros(3, device="cuda").sum() == 0


def test_a_wait_while_a_cuda_graph_records_is_refused(memory: EngramMemory) -> None:
    with RowPrefetcher(memory, device="cuda") as prefetcher:
        step = prefetcher.prefetch(TOKENS)
        step.wait(1)
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
            pytest.raises(RuntimeError, match="a CUDA graph or a trace records"),
        ):
            step.wait(1)


@pytest.mark.parametrize("kind", list(_core.RowKind))
def test_the_servers_converter_proves_itself(kind: _core.RowKind) -> None:
    assert open_converter("cuda:0", [kind]) is not None


def test_a_server_that_converts_on_the_gpu(truth: Truth, tmp_path: Path) -> None:
    with serving(truth.path, tmp_path, device="cuda") as server, EngramClient(server.targets[0]) as client:
        assert "; bf16 on cuda" in server.ready_line
        for options in ({}, {"unique": True}, {"columns": (3, 17)}):
            begin, end = options.get("columns", (0, 24))
            found = client.lookup(TOKENS, **options)
            expected = truth.values(truth.ids(TOKENS)[:, :, begin:end], "bf16")
            np.testing.assert_array_equal(found.values, expected)
