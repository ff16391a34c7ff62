"""What the backbone does with the rows: the Engram layer of DeepSeek-V4.1, as its reference computes it."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

_COLUMNS = 24
_VALUES = 256
_HIDDEN = 5120
_STREAMS = 4
_EPS = 1e-20
_GATE_DOT_MIN = 1e-6


class EngramLayer(nn.Module):
    """Adds a layer's rows to the residual, at the layer's input, on every hyper-connection stream.

    For stream c, all in float32:

        key_0 .. key_3, value = wkv · rows
        dot  = Σ h·q_weight[c]·k_weight[c]·key_c · rsqrt(mean(h²) + eps) · rsqrt(mean(key_c²) + eps) / sqrt(hidden)
        gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)), 0 at image positions
        out  = h + gate · value, cast once

    Engines multiply by wkv in FP8 and so differ in the last bits; so would torch's TF32, which is off unless asked for
    (`torch.set_float32_matmul_precision`). Parameters are named as in the checkpoint.
    """

    def __init__(
        self,
        hidden: int = _HIDDEN,
        streams: int = _STREAMS,
        columns: int = _COLUMNS,
        *,
        eps: float = _EPS,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """hidden, streams: shape of the residual. eps: the config's rms_norm_eps. dtype: of the weights."""
        super().__init__()
        self.hidden = hidden
        self.streams = streams
        self.eps = eps
        self.wkv = nn.Linear(
            columns * _VALUES, (streams + 1) * hidden, bias=False, dtype=dtype, device=device
        )
        self.q_weight = nn.Parameter(torch.ones(streams, hidden, dtype=dtype, device=device))
        self.k_weight = nn.Parameter(torch.ones(streams, hidden, dtype=dtype, device=device))

    @classmethod
    def from_checkpoint(
        cls, path: str | os.PathLike[str], layer: int, device: torch.device | str = "cpu"
    ) -> Self:
        """The layer with the weights of a checkpoint directory; wkv from FP8 blocks becomes bf16, exactly.

        Reads 157 MB of the released model. Raises ValueError for a checkpoint without it, OSError.
        """
        from engram_client.torch._weights import (
            read_weights,
        )  # brings the server's reading of checkpoints along

        weights = read_weights(path, layer)
        made = cls(weights.hidden, weights.streams, weights.columns, eps=weights.eps, device="meta")
        made.load_state_dict(weights.tensors, assign=True)
        return made.to(device).requires_grad_(False)

    def forward(self, hidden: Tensor, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        """hidden [T, streams, hidden], rows bfloat16 [T, columns, 256], mask bool [T], true at image positions.

        Returns what `hidden` becomes, in its dtype; autocast changes nothing. Rows must be finite also where `mask` is
        true. Raises ValueError for tensors that do not fit: none is broadcast.
        """
        self._check(hidden, rows, mask)
        kind = hidden.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            return self._added(hidden, rows, mask)

    def _added(self, hidden: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
        flat = rows.flatten(1).float()
        weights = self.wkv.weight.split(self.hidden)  # one at a time: in float32 all are 630 MB
        value = functional.linear(flat, weights[-1].float())
        h = hidden.float()
        scaled = h * (self.q_weight.float() * self.k_weight.float())
        h_norm = torch.rsqrt(h.square().mean(-1) + self.eps)
        out = torch.empty_like(h)
        for stream, weight in enumerate(weights[:-1]):
            key = functional.linear(flat, weight.float())
            dot = (scaled[:, stream] * key).sum(-1) * h_norm[:, stream]
            dot = dot * torch.rsqrt(key.square().mean(-1) + self.eps) / math.sqrt(self.hidden)
            gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=_GATE_DOT_MIN).sqrt(), dot))
            if mask is not None:
                gate = gate.masked_fill(mask, 0.0)
            out[:, stream] = h[:, stream] + gate[:, None] * value
        return out.to(hidden.dtype)

    def _check(self, hidden: Tensor, rows: Tensor, mask: Tensor | None) -> None:
        tokens = hidden.shape[:1]
        device = self.wkv.weight.device
        row = (self.wkv.in_features // _VALUES, _VALUES)
        fitting: list[tuple[str, Tensor | None, str, tuple[int, ...]]] = [
            ("hidden", hidden, "floating point", (*tokens, self.streams, self.hidden)),
            ("rows", rows, "floating point", (*tokens, *row)),
            ("mask", mask, "bool", tokens),
        ]
        for name, tensor, kind, shape in fitting:
            if tensor is None:
                continue
            right = tensor.is_floating_point() if kind == "floating point" else tensor.dtype == torch.bool
            if not right or tensor.shape != shape or tensor.device != device:
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}; expected {kind} "
                    f"{list(shape)} on {device}, for so many tokens as hidden has"
                )
