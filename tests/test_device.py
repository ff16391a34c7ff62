"""`serve --device`: the same rows by way of a device, here the CPU with the kernel interpreted; tests/gpu/ on a GPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engram_kernels.device
from engram_kernels import _core
from engram_server import lookup
from engram_server.device import DeviceConverter, DeviceError, check_name, open_converter
from engram_server.fetch import Fetcher
from engram_server.limits import Limits
from engram_server.lookup import Plan, Request
from engram_server.memory import Memory
from engram_server.terms import Terms

TOKENS = np.array([0, 3, 17, 17, *range(1000, 1020)], dtype=np.int32)
CPU = torch.device("cpu")


@pytest.fixture(params=["fp4", "fp8"])
def memory(request: pytest.FixtureRequest) -> Any:
    with Memory.open(request.getfixturevalue(f"{request.param}_checkpoint")) as opened:
        yield opened


@pytest.fixture
def converter(memory: Memory) -> DeviceConverter:
    """With room for three tokens of one layer at a time: every answer takes many passes."""
    return DeviceConverter(CPU, {table.kind for table in memory.tables.values()}, slot_rows=72)


def requests(memory: Memory, format: _core.Format) -> list[Request]:
    nothing = np.empty(0, dtype=np.int32)
    by_token: dict[str, Any] = {"memory": memory, "sequences": [(TOKENS, nothing)], "format": format}
    ids = np.array([5, -1, 0, 5, memory.tables[14].rows - 1])
    return [
        lookup.from_tokens(**by_token),
        lookup.from_tokens(**by_token, layers=[14], columns=(6, 12)),
        lookup.from_tokens(**by_token, unique=True),
        lookup.from_rows(memory, 14, ids, format=format),
        lookup.from_rows(memory, 14, ids, format=format, unique=True),
    ]


def test_what_a_device_converts_is_counted(memory: Memory, converter: DeviceConverter) -> None:
    spent_s, made = converter.converted()
    assert (spent_s, made) == (0.0, 0), "what it was proven with is not"
    request = requests(memory, _core.Format.BF16)[0]
    planned = lookup.plan(memory, request, 1 << 20)
    began = time.perf_counter()
    for block in planned.blocks:
        batch = block.submit(memory.engine, Terms(_core.Lane.DECODE))
        assert batch.wait(60)
        kind = memory.tables[block.keys[0][0]].kind
        converter.payload(batch, block, kind, 0, block.items)
    elapsed = time.perf_counter() - began
    spent_s, made = converter.converted()
    assert made == planned.shape.payload_bytes
    assert 0 < spent_s < elapsed


async def payload(fetcher: Fetcher, plan: Plan) -> bytes:
    terms, parts = Terms(_core.Lane.DECODE), []
    for block in plan.blocks:
        batch = await fetcher.submit(block, terms, patient=False)
        await fetcher.rows_read(batch, terms)
        for first, count in block.spans(20_000):
            parts.append(await fetcher.gather(batch, block, first, count, plan.shape.format, terms))
    return b"".join(parts)


def payloads(memory: Memory, plans: list[Plan], converter: DeviceConverter | None) -> list[bytes]:
    """What the service would send for each, all at once."""

    async def fetch() -> list[bytes]:
        fetcher = Fetcher(memory, Limits(), lambda sentence: None, converter)
        try:
            return await asyncio.gather(*(payload(fetcher, plan) for plan in plans))
        finally:
            fetcher.close()

    return asyncio.run(fetch())


@pytest.mark.parametrize("format", [_core.Format.BF16, _core.Format.PACKED, _core.Format.FP32])
def test_answers_are_those_of_the_native_core(
    memory: Memory, converter: DeviceConverter, format: _core.Format
) -> None:
    plans = [lookup.plan(memory, request) for request in requests(memory, format)] * 2
    ours = payloads(memory, plans, converter)
    assert ours == payloads(memory, plans, None)
    for plan, answer in zip(plans, ours, strict=True):
        assert len(answer) == plan.shape.payload_bytes - sum(inverse.nbytes for inverse in plan.inverse)


def test_only_bf16_goes_by_way_of_the_device(
    memory: Memory, converter: DeviceConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    convert = engram_kernels.device.convert_rows

    def counted(*arguments: Any, **options: Any) -> None:
        calls.append(len(arguments[0]))
        convert(*arguments, **options)

    monkeypatch.setattr(engram_kernels.device, "convert_rows", counted)
    for format, passes in ((_core.Format.PACKED, 0), (_core.Format.BF16, 1)):
        plan = lookup.plan(memory, requests(memory, format)[3])
        payloads(memory, [plan], converter)
        assert len(calls) == passes
    assert calls == [5]


def test_a_device_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = engram_kernels.device.convert_rows

    def flushed(packed: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        convert(packed, out, **options)
        out.view(torch.int16)[(out.view(torch.int16) & 0x7F80) == 0] = 0  # subnormal numbers become zero

    monkeypatch.setattr(engram_kernels.device, "convert_rows", flushed)
    with pytest.raises(DeviceError, match="cpu converts FP4 rows to other bits than this CPU does"):
        DeviceConverter(CPU, [_core.RowKind.FP4])


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda0", "CUDA", ""])
def test_names_of_devices(device: str) -> None:
    with pytest.raises(DeviceError, match="expected cpu, cuda or cuda:N"):
        check_name(device)


def test_cuda_without_a_gpu_is_a_sentence_at_the_start(fp4_checkpoint: Path) -> None:
    for device, sentence in (
        ("cuda", "engram-server serve: --device cuda: torch "),
        ("tpu", "engram-server serve: the device is 'tpu'; expected cpu, cuda or cuda:N"),
    ):
        command = ["serve", str(fp4_checkpoint), "--listen", "127.0.0.1:0", "--device", device]
        ran = subprocess.run(
            [sys.executable, "-m", "engram_server.cli", *command],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 1
        assert sentence in ran.stderr
        assert "Traceback" not in ran.stderr
        assert ran.stdout == ""


def test_the_cpu_needs_no_torch() -> None:
    assert open_converter("cpu", [_core.RowKind.FP4]) is None
    code = (
        "import sys, engram_server.server; from engram_server.device import open_converter; "
        "open_converter('cpu', []); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
