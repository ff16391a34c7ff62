"""A layer's table as an embedding."""

from __future__ import annotations

from torch import Tensor, nn

from engram_client._errors import InvalidRequestError
from engram_client.torch._prefetch import RowPrefetcher

_VALUES = 256


class EngramRows(nn.Module):
    """`nn.Embedding` over a table that is elsewhere: row ids [..., 24] -> rows [..., 24, 256] in bfloat16.

    Ids are those of the layer's table, int32 or int64, on any device; -1 gives a zero row. Rows come to the
    prefetcher's device. Each call waits for its rows: to have them sooner, ask with `RowPrefetcher.prefetch_blocks`.
    No parameters, nothing in the state dict, no gradient.
    """

    def __init__(self, prefetcher: RowPrefetcher, layer: int) -> None:
        """Raises ValueError when there is no table of the layer."""
        super().__init__()
        if layer not in prefetcher.tables:
            served = ", ".join(str(known) for known in prefetcher.tables)
            raise ValueError(f"layer {layer} has no table here; the layers served are {served}")
        self.layer = layer
        self.num_embeddings = prefetcher.tables[layer].rows
        self.embedding_dim = _VALUES
        self._prefetcher = prefetcher

    def forward(self, ids: Tensor) -> Tensor:
        """Raises the exceptions of `EngramError`; InvalidRequestError names an id that is no row."""
        if ids.ndim == 0 or ids.shape[-1] == 0:
            raise InvalidRequestError(f"row ids have shape {list(ids.shape)}; expected [..., 24]")
        step = self._prefetcher.prefetch_blocks({self.layer: ids.reshape(-1, ids.shape[-1])})
        rows = step.wait(self.layer).rows
        return rows.view(*ids.shape[:-1], rows.shape[-2], _VALUES)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"layer={self.layer}, {self.num_embeddings}, {self.embedding_dim}"
