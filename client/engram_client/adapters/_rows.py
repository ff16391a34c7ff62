"""Rows for the ids that an engine has hashed, written to where the engine wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engram_client._errors import UnavailableError
from engram_client._query import LookupMethods
from engram_client._result import Format, Lane, Lookup, to_torch
from engram_kernels.device import ScaleRule, convert_rows
from engram_kernels.staging import SideStream, Uploader

_VALUES = 256
_GONE = (
    "The step has no Engram rows and fails. ENGRAM_SERVER_WAIT_S is how long it waits for a server to come back; "
    "several servers in ENGRAM_SERVER_TARGET stand in for one another."
)
_PACKED_FP8_BYTES = 264


class Wanted(NamedTuple):
    """Rows of one layer, and their place."""

    ids: Tensor
    """int32 or int64 [T, all columns], on any device, any strides: row ids of the layer's table; -1 = zero row."""
    out: Tensor
    """bfloat16 [T', C', 256], or uint8 [T', C', 264] for packed FP8 rows. T' >= T, and C' not less than the columns
    fetched: what is left over becomes zeros. May be a strided view."""


class RowSource:
    """Fetches rows over any client. For one thread.

    A tensor-parallel rank takes its range of columns; whole id blocks go to the server all the same, since all the
    ids of a row group identify it.
    """

    def __init__(
        self,
        client: LookupMethods[Lookup],
        device: torch.device,
        *,
        columns: tuple[int, int],
        scale_rule: ScaleRule = "vllm",
    ) -> None:
        """device: where `out` tensors are. columns: (begin, end) of those that are fetched."""
        self._client = client
        self._device = device
        self._scale_rule: ScaleRule = scale_rule
        self._stream = SideStream(device)
        self._uploader = Uploader(device, self._stream)
        self.columns = columns

    def fill(self, wanted: Mapping[int, Wanted], *, lane: Lane = "auto", wait_s: float | None = None) -> None:
        """Write the rows of some layers, by layer, all with the same T, in one lookup.

        On a GPU, work that is given to the current stream afterwards sees them. All of `out` is this call's rows or
        zeros, or an exception is raised: `EngramError`, ValueError for tensors that do not fit. wait_s: seconds the
        lookup may take, None = as the client was told.
        """
        for layer, (ids, out) in wanted.items():
            self._check(layer, ids, out)
        tokens = len(next(iter(wanted.values())).ids)
        if tokens == 0:
            for _, out in wanted.values():
                out.zero_()
            return
        self._follow_current_stream()
        blocks = {layer: _host(ids) for layer, (ids, _) in wanted.items()}
        try:
            found = self._client.lookup_blocks(
                blocks, columns=self.columns, format=self._format(wanted), lane=lane, timeout=wait_s
            )
        except UnavailableError as error:
            error.add_note(_GONE)
            raise
        values = found.values
        for index, (_, out) in enumerate(wanted.values()):
            self._place(values[:, index], found.format, out)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._stream.mark())

    def _follow_current_stream(self) -> None:
        """What was given to the current stream so far may still read or write `out`."""
        if self._device.type == "cuda":
            given = torch.cuda.current_stream(self._device).record_event()
            with self._stream.current():
                torch.cuda.current_stream(self._device).wait_event(given)

    def _format(self, wanted: Mapping[int, Wanted]) -> Format:
        """Rows cross to a GPU as the table's own bytes, a quarter of bf16's; so does what only we can convert."""
        if self._device.type == "cuda" or self._scale_rule != "vllm":
            return "packed"
        dtypes = {out.dtype for _, out in wanted.values()}
        if dtypes == {torch.bfloat16}:
            return "bf16"
        return "packed-fp8" if dtypes == {torch.uint8} else "packed"

    def _place(self, rows: NDArray[np.generic], format: Format, out: Tensor) -> None:
        """rows [T, C, W], as the client has them."""
        tokens, columns = rows.shape[:2]
        with self._stream.current():
            if format == "packed":
                convert_rows(
                    self._on_device(rows.view(np.uint8)), out[:tokens, :columns], scale_rule=self._scale_rule
                )
            else:
                out[:tokens, :columns] = to_torch(rows, format)
            out[tokens:] = 0
            out[:tokens, columns:] = 0

    def _on_device(self, rows: NDArray[np.uint8]) -> Tensor:
        rows = np.ascontiguousarray(rows)
        if self._device.type == "cpu":
            return torch.from_numpy(rows)
        target = torch.empty(rows.size, dtype=torch.uint8, device=self._device)
        self._uploader.upload(rows.reshape(-1), target)
        return target.view(rows.shape)

    def _check(self, layer: int, ids: Tensor, out: Tensor) -> None:
        width = {torch.bfloat16: _VALUES, torch.uint8: _PACKED_FP8_BYTES}.get(out.dtype)
        if out.ndim != 3 or out.shape[2] != width:
            raise ValueError(
                f"rows of layer {layer} are wanted in {out.dtype} of shape {list(out.shape)}; expected bfloat16 "
                f"[T, C, {_VALUES}] or uint8 [T, C, {_PACKED_FP8_BYTES}]"
            )
        if ids.ndim != 2 or ids.shape[0] > out.shape[0] or self.columns[1] - self.columns[0] > out.shape[1]:
            raise ValueError(
                f"row ids of layer {layer} have shape {list(ids.shape)}, their rows a place of shape "
                f"{list(out.shape)} for columns {self.columns[0]} to {self.columns[1]} (end excluded): too small"
            )
        if out.device != self._device:
            raise ValueError(f"rows of layer {layer} are wanted on {out.device}, not on {self._device}")


def _host(ids: Tensor) -> NDArray[np.generic]:
    """Waits for the device to have computed them."""
    array: NDArray[np.generic] = ids.detach().cpu().numpy()
    return np.ascontiguousarray(array)
