"""Packed rows that are on a device already, converted there: `convert_rows` for torch tensors.

Needs torch; on a GPU also Triton, which torch's GPU builds bring along. The rows are those of the native kernels, bit
for bit, for every code and scale byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from engram_kernels import torch_dequant

ScaleRule: TypeAlias = Literal["vllm", "sglang", "sglang-cpu"]
"""What E8M0 bytes 0 and 255 stand for: 0.0 and infinity (vLLM's kernels, and ours everywhere); 2^-127 and infinity
(SGLang's Triton kernels); 2^-127 and NaN (SGLang on a CPU). No released row has either byte."""

Backend: TypeAlias = Literal["auto", "triton", "torch"]
"""auto: Triton on a GPU, torch operators on the CPU."""

_FP4_ROW_BYTES = 136
_FP8_ROW_BYTES = 264
_VALUES = 256
_ALIGNMENT_BYTES = 8
_ROWS_MAX = 2**31 - 1024
"""Rows are counted in int32; so many take 292 GB."""


def convert_rows(
    packed: Tensor,
    out: Tensor,
    *,
    index: Tensor | None = None,
    scale_rule: ScaleRule = "vllm",
    backend: Backend = "auto",
) -> None:
    """Fill `out` with packed rows, converted; on a GPU a launch on the current stream.

    packed
        uint8 [n, W] or [T, C, W]: W is 136 for FP4 rows, 264 for FP8 rows.
    out
        bfloat16 [..., 256], or uint8 [..., 264] for packed FP8 rows, with one or two dimensions before.
    index
        int32 or int64, with the dimensions that `out` has before its last: which row (counted through [T, C]) comes
        where. -1 gives a zero row; any other number that is no row gives NaN. Without it, rows come in order.

    `out` may be longer than `index` (or, without one, `packed`) along the first dimension: what is left over is
    padding and becomes zeros. All may be strided views, but for their last dimension, which is contiguous (`index`: any
    strides).

    Raises ValueError for tensors that do not fit, RuntimeError when `backend` cannot run here.
    """
    call = _checked(packed, out, index)
    if scale_rule not in get_args(ScaleRule):
        raise ValueError(f"scale_rule is {scale_rule!r}; expected one of {', '.join(get_args(ScaleRule))}")
    if call.out.rows == 0:
        return
    if backend == "auto":
        backend = "triton" if out.is_cuda else "torch"
    if backend == "triton":
        _launch(call, scale_rule)
    elif backend == "torch":
        torch_dequant.convert_rows(
            packed.flatten(0, -2),
            index,
            out,
            fp4=call.fp4,
            zero_is_subnormal=scale_rule != "vllm",
            max_is_nan=scale_rule == "sglang-cpu",
        )
    else:
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(get_args(Backend))}")


@dataclass(frozen=True, eq=False)
class _Grid:
    """A tensor as rows: row r begins at r // inner * outer_stride + r % inner * inner_stride."""

    tensor: Tensor
    rows: int
    inner: int
    outer_stride: int
    inner_stride: int

    @classmethod
    def of(cls, tensor: Tensor, dimensions: int) -> _Grid:
        """The rows that the first one or two dimensions count."""
        strides = tensor.stride()
        if dimensions == 1:
            return cls(tensor, tensor.shape[0], 1, strides[0], 0)
        return cls(tensor, tensor.shape[0] * tensor.shape[1], max(tensor.shape[1], 1), strides[0], strides[1])

    @property
    def layout(self) -> tuple[int, int, int]:
        return self.inner, self.outer_stride, self.inner_stride

    @property
    def is_aligned(self) -> bool:
        """Whether every row begins at a multiple of 8 bytes, as packed rows back to back do."""
        size = self.tensor.element_size()
        begins = (self.tensor.data_ptr(), self.outer_stride * size, self.inner_stride * size)
        return all(begin % _ALIGNMENT_BYTES == 0 for begin in begins)


@dataclass(frozen=True, eq=False)
class _Call:
    packed: _Grid
    index: _Grid | None
    out: _Grid
    asked_rows: int
    """Rows of `out` that are not padding."""
    fp4: bool


def _launch(call: _Call, scale_rule: ScaleRule) -> None:
    if not call.out.tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            f"Triton does not run on {call.out.tensor.device}: take backend='torch', or set TRITON_INTERPRET=1 before "
            "anything imports Triton, to interpret the kernel for a test"
        )
    import triton

    from engram_kernels import triton_dequant

    to_fp8 = call.out.tensor.dtype == torch.uint8
    index = call.index or call.packed
    rows = triton_dequant.ROWS if call.out.tensor.is_cuda else triton_dequant.ROWS_INTERPRETED
    grid = (triton.cdiv(call.out.rows, rows),)
    with torch.cuda.device_of(call.out.tensor):
        triton_dequant.convert_rows_kernel[grid](
            call.packed.tensor,
            index.tensor,
            call.out.tensor if to_fp8 else call.out.tensor.view(torch.int16),
            call.packed.rows,
            call.asked_rows,
            call.out.rows,
            *call.packed.layout,
            *index.layout,
            *call.out.layout,
            FP4=call.fp4,
            TO_FP8=to_fp8,
            INDEXED=call.index is not None,
            ZERO_IS_SUBNORMAL=scale_rule != "vllm",
            MAX_IS_NAN=scale_rule == "sglang-cpu",
            ALIGNED=call.packed.is_aligned and call.out.is_aligned,
            ROWS=rows,
        )


def _checked(packed: Tensor, out: Tensor, index: Tensor | None) -> _Call:
    _check_rows("packed", packed, {torch.uint8: (_FP4_ROW_BYTES, _FP8_ROW_BYTES)})
    _check_rows("out", out, {torch.bfloat16: (_VALUES,), torch.uint8: (_FP8_ROW_BYTES,)})
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError("out is an expanded view, whose rows lie on one another: give it memory of its own")
    for name, tensor in {"packed": packed, "index": index}.items():
        if tensor is not None and tensor.device != out.device:
            raise ValueError(f"{name} is on {tensor.device}, out on {out.device}: bring them together first")
    if index is not None and index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index is {index.dtype}; expected int32 or int64")
    name, lead = ("packed", packed.shape[:-1]) if index is None else ("index", index.shape)
    if len(lead) != out.ndim - 1 or lead[1:] != out.shape[1:-1] or lead[0] > out.shape[0]:
        raise ValueError(
            f"{name} gives rows of shape {list(lead)}, but out has room for {list(out.shape[:-1])}: only the first "
            "dimension may be longer there"
        )
    return _Call(
        packed=_Grid.of(packed, packed.ndim - 1),
        index=None if index is None else _Grid.of(index, index.ndim),
        out=_Grid.of(out, out.ndim - 1),
        asked_rows=lead.numel(),
        fp4=packed.shape[-1] == _FP4_ROW_BYTES,
    )


def _check_rows(name: str, tensor: Tensor, widths: dict[torch.dtype, tuple[int, ...]]) -> None:
    fitting = tensor.ndim in (2, 3) and tensor.shape[-1] in widths.get(tensor.dtype, ())
    if not fitting:
        described = " or ".join(
            f"{str(dtype).removeprefix('torch.')} [..., {width}]"
            for dtype, sizes in widths.items()
            for width in sizes
        )
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; expected {described}, with one or two dimensions "
            "before the last"
        )
    if tensor.shape[:-1].numel() > _ROWS_MAX:
        raise ValueError(
            f"{name} has {tensor.shape[:-1].numel()} rows; convert at most {_ROWS_MAX} at a time"
        )
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} has stride {tensor.stride(-1)}; only the others may be strided"
        )
