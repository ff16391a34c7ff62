"""The small Engram tensors of a checkpoint: wkv, q_weight, k_weight."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram_server.tables.checkpoint import Source, locate
from engram_server.tables.errors import TableError

_VALUES = 256
_BLOCK = 32
_EPS = 1e-20
_PLAIN = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """What an EngramLayer is made of."""

    hidden: int
    streams: int
    columns: int
    eps: float
    tensors: dict[str, Tensor]
    """By the name inside the layer: wkv.weight, q_weight, k_weight."""


def read_weights(path: str | os.PathLike[str], layer: int) -> LayerWeights:
    """Read a layer's weights. Raises TableError (a ValueError) for tensors that are missing or do not fit, OSError."""
    source = locate(Path(path))
    q, k = (_plain(source, layer, name) for name in ("q_weight", "k_weight"))
    wkv = _wkv(source, layer)
    fits = q.ndim == 2 and k.shape == q.shape and wkv.ndim == 2
    if not fits or wkv.shape[0] != (q.shape[0] + 1) * q.shape[1] or wkv.shape[1] % _VALUES:
        raise TableError(
            f"{source.listing}: layer {layer} has wkv {list(wkv.shape)}, q_weight {list(q.shape)} and k_weight "
            f"{list(k.shape)}; expected [(streams + 1) * hidden, columns * 256] and twice [streams, hidden]"
        )
    tensors = {"wkv.weight": wkv, "q_weight": q, "k_weight": k}
    return LayerWeights(q.shape[1], q.shape[0], wkv.shape[1] // _VALUES, _eps(source.config), tensors)


def _eps(config: Path) -> float:
    try:
        keys: Any = json.loads(config.read_bytes())
    except ValueError as error:
        raise TableError(f"{config} is no JSON: {error}") from error
    text = keys.get("text_config", keys) if isinstance(keys, dict) else None
    if not isinstance(text, dict):
        raise TableError(f"{config} has no object of the model's settings, with rms_norm_eps among them")
    eps = text.get("rms_norm_eps", _EPS)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < math.inf:
        raise TableError(f"{config}: rms_norm_eps is {eps!r}; expected a number above 0")
    return float(eps)


def _wkv(source: Source, layer: int) -> Tensor:
    name = f"layers.{layer}.engram.wkv.weight"
    if name not in source.engram_tensors or source.tensor(name).dtype in _PLAIN:
        return _plain(source, layer, "wkv.weight")
    codes = _raw(source, name, "F8_E4M3")
    scales = _raw(source, f"layers.{layer}.engram.wkv.scale", "F8_E8M0")
    if codes.shape != (scales.shape[0] * _BLOCK, scales.shape[1] * _BLOCK):
        raise TableError(
            f"{source.listing}: {name} {list(codes.shape)} has scales {list(scales.shape)}; expected one for each "
            f"block of {_BLOCK} x {_BLOCK}"
        )
    blocks = (scales.int() << 23).view(torch.float32).repeat_interleave(_BLOCK, dim=1)
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    for block, row in enumerate(range(0, len(codes), _BLOCK)):  # a power of two times 4 bits: exact in bf16
        stripe = codes[row : row + _BLOCK].view(torch.float8_e4m3fn).float()
        out[row : row + _BLOCK] = stripe * blocks[block]
    return out


def _plain(source: Source, layer: int, part: str) -> Tensor:
    name = f"layers.{layer}.engram.{part}"
    dtype = source.tensor(name).dtype if name in source.engram_tensors else "BF16"
    raw = _raw(source, name, dtype if dtype in _PLAIN else "BF16")
    return raw.view(_PLAIN[dtype])


def _raw(source: Source, name: str, dtype: str) -> Tensor:
    """A tensor's bytes as uint8, the last dimension as long as its bytes are."""
    if name not in source.engram_tensors:
        raise TableError(
            f"{source.listing} lists no {name!r}; use a checkpoint that has the backbone's part of Engram"
        )
    tensor, shard = source.tensor(name), source.engram_tensors[name]
    if tensor.dtype != dtype or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise TableError(
            f"{shard}: {name!r} is {tensor.dtype}{list(tensor.shape)}; expected {dtype} in two dimensions"
        )
    data = np.fromfile(shard, dtype=np.uint8, count=tensor.end - tensor.begin, offset=tensor.begin)
    return torch.from_numpy(data).view(tensor.shape[0], -1)
