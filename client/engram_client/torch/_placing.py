"""From the arrays of a lookup to a tensor on the model's device."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engram_client._result import Format, Lookup
from engram_kernels import staging
from engram_kernels.device import ScaleRule, convert_rows
from engram_kernels.staging import SideStream, Uploader

RowFormat: TypeAlias = Literal["auto", "packed", "bf16"]
"""How rows come to the model's device: as the table's own bytes, a quarter (FP4) or half (FP8) of bf16's, and converted
there; or as bf16. auto: packed to a GPU, bf16 to the CPU."""

_VALUES = 256


class LayerRows(NamedTuple):
    """Rows of one layer, on the model's device."""

    rows: Tensor
    """bfloat16 [T, C, 256]"""
    mask: Tensor | None
    """bool [T], true at image positions, whose gate is 0. None for rows asked for by row id."""


class Placer:
    """Brings the rows of one layer to a device. For one thread."""

    def __init__(self, device: torch.device, row_format: RowFormat, scale_rule: ScaleRule = "vllm") -> None:
        if row_format not in get_args(RowFormat):
            raise ValueError(
                f"row_format is {row_format!r}; expected one of {', '.join(get_args(RowFormat))}"
            )
        self._device = device
        self._on_gpu = device.type != "cpu"
        self._scale_rule: ScaleRule = scale_rule
        self._stream = SideStream(device)
        self._uploader = Uploader(device, self._stream)
        self._registration: staging.Registration | None = None
        self._direct = False
        packed = row_format == "packed" or (row_format == "auto" and self._on_gpu)
        packed |= scale_rule != "vllm"  # which servers go by
        self.format: Format = "packed" if packed else "bf16"
        """What to ask of the client."""

    def place(self, found: Lookup, shared: NDArray[np.uint8] | None = None) -> LayerRows:
        """A lookup of one layer; on return the rows are there, for any stream to use.

        shared: the shared memory that its arrays are part of, and that is free again on return; None = they have memory
        of their own, which the rows may keep.
        """
        if not self._on_gpu:
            return self._on_cpu(found, shared is not None)
        try:
            with self._stream.current():
                self._direct = shared is not None and self._registered(shared)
                rows = self._converted(found) if self.format == "packed" else self._copied(found)
                mask = None if found.mask is None else torch.from_numpy(found.mask).to(self._device)
        finally:
            self._stream.finish()
        return LayerRows(rows, mask)

    def _on_cpu(self, found: Lookup, copied: bool) -> LayerRows:
        rows = self._converted(found) if self.format == "packed" else found.torch()[:, 0]
        mask = None if found.mask is None else torch.from_numpy(found.mask)
        if copied:
            rows = rows if self.format == "packed" else rows.clone()
            mask = None if mask is None else mask.clone()
        return LayerRows(rows, mask)

    def close(self) -> None:
        """Let go of shared memory."""
        self._registration = None

    def _registered(self, shared: NDArray[np.uint8]) -> bool:
        """Whether rows may go to the GPU without a pinned buffer between. Each server brings memory of its own."""
        if self._registration is None or self._registration.memory is not shared:
            self._registration = staging.registered(shared, self._device)
        return self._registration.known

    def _copied(self, found: Lookup) -> Tensor:
        bits = found.values[:, 0]
        flat = self._upload(bits.view(np.uint8))
        return flat.view(torch.bfloat16).view(bits.shape)

    def _converted(self, found: Lookup) -> Tensor:
        layer = found.layers[0]
        if found.unique is None or found.inverse is None:
            packed, index = found.values[:, 0], None
            shape = packed.shape[:-1]
        else:
            packed, inverse = found.unique[layer], found.inverse[layer]
            index = self._upload(inverse.view(np.uint8)).view(torch.int32).view(inverse.shape)
            shape = inverse.shape
        rows = torch.empty(*shape, _VALUES, dtype=torch.bfloat16, device=self._device)
        convert_rows(self._upload(packed).view(packed.shape), rows, index=index, scale_rule=self._scale_rule)
        return rows

    def _upload(self, array: NDArray[np.uint8]) -> Tensor:
        """uint8[n] on the device; on the CPU, the array's own memory."""
        flat = array.reshape(-1)
        if not self._on_gpu:
            return torch.from_numpy(flat)
        target = torch.empty(len(flat), dtype=torch.uint8, device=self._device)
        if self._direct:
            target.copy_(torch.from_numpy(flat), non_blocking=True)
        else:
            self._uploader.upload(flat, target)
        return target
