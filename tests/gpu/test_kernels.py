"""The statements of tests/test_gpu_kernels.py on a GPU, and that what is launched runs where it should."""

import numpy as np
import pytest
import torch
from support import device_rows as rows
from support.device_rows import FORMATS, Way

from engram_kernels.device import convert_rows

WAYS = {"triton": Way("cuda", "triton"), "torch": Way("cuda", "torch"), "auto": Way("cuda", "auto")}

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_format = pytest.mark.parametrize(("kind", "fmt"), FORMATS)


@every_way
@every_format
def test_every_code_under_every_scale(way: Way, kind: str, fmt: str) -> None:
    rows.check_every_code_under_every_scale(way, kind, fmt)


@every_way
@every_format
def test_each_block_takes_its_own_scale(way: Way, kind: str, fmt: str) -> None:
    rows.check_each_block_takes_its_own_scale(way, kind, fmt)


@every_way
@every_format
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_by_number_and_padding(way: Way, kind: str, fmt: str, dtype: type) -> None:
    rows.check_expansion(way, kind, fmt, dtype)


@every_way
@every_format
def test_padding_without_an_index(way: Way, kind: str, fmt: str) -> None:
    rows.check_padding_without_an_index(way, kind, fmt)


@every_way
@every_format
def test_a_number_that_is_no_row_gives_nan(way: Way, kind: str, fmt: str) -> None:
    rows.check_a_number_that_is_no_row_gives_nan(way, kind, fmt)


@every_way
@every_format
@pytest.mark.parametrize("shift", [24, 5])
def test_strided_views(way: Way, kind: str, fmt: str, shift: int) -> None:
    rows.check_strided_views(way, kind, fmt, shift)


@every_way
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_scale_bytes_by_the_rules_of_others(way: Way, kind: str) -> None:
    rows.check_scale_rules(way, kind)


@every_way
@every_format
def test_nothing_to_do(way: Way, kind: str, fmt: str) -> None:
    rows.check_nothing_to_do(way, kind, fmt)


def test_more_than_two_gigabytes_of_rows() -> None:
    """Row numbers times strides pass 2^31 on the way."""
    packed = torch.from_numpy(rows.random_rows("fp4", 1000)).cuda()
    index = torch.randint(0, 1000, (10_000_000,), device="cuda")
    out = torch.empty(10_000_000, 256, dtype=torch.bfloat16, device="cuda")
    convert_rows(packed, out, index=index)
    few = torch.empty(1000, 256, dtype=torch.bfloat16, device="cuda")
    convert_rows(packed, few)
    for part in torch.arange(10_000_000, device="cuda").split(1_000_000):
        assert torch.equal(out[part].view(torch.int16), few[index[part]].view(torch.int16))


def test_a_launch_can_be_captured_in_a_cuda_graph() -> None:
    packed = torch.from_numpy(rows.random_rows("fp4", 100)).cuda()
    index = torch.arange(50, device="cuda")
    out = torch.zeros(50, 256, dtype=torch.bfloat16, device="cuda")
    convert_rows(packed, out, index=index)  # compiled before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        convert_rows(packed, out, index=index)
    index.copy_(torch.arange(99, 49, -1))
    graph.replay()
    expected = torch.zeros_like(out)
    convert_rows(packed, expected, index=index)
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
