"""The statements of tests/test_gpu_kernels.py on a GPU, and that what is launched runs where it should."""

import torch
from support import device_rows as rows
from support.device_rows import ConvertRowsTests

from engram_kernels.device import convert_rows


class TestOnTheGpu(ConvertRowsTests):
    device = "cuda"


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
