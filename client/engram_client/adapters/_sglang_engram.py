"""SGLang's Engram modules without tables: rows as the forward asks for them, or as the scheduler staged them."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engram_client._sync import EngramClient
from engram_client.adapters import _handshake, _sglang_graphs
from engram_client.adapters._handshake import EngineFacts
from engram_client.adapters._rows import RowSource, Wanted
from engram_client.adapters._settings import Settings
from engram_client.adapters._sglang_graphs import FullGraphs
from engram_client.torch import RowPrefetcher
from engram_kernels.device import ScaleRule


def scale_rule(device: torch.device) -> ScaleRule:
    """SGLang's own reading of scale bytes 0 and 255 differs between its kernels and its CPU path."""
    return "sglang-cpu" if device.type == "cpu" else "sglang"


def embedding_class(
    engram: ModuleType, connect: Callable[[], EngramClient], graphs: FullGraphs
) -> type[nn.Module]:
    """An `EngramEmbedding` whose rows come from a server. engram: the module sglang.srt.layers.engram."""

    class RemoteEngramEmbedding(engram.EngramEmbedding):  # type: ignore[misc, name-defined]
        """One layer's table, elsewhere. No parameters: nothing is allocated, loaded or saved.

        A rank asks for the rows that its shard would hold, and gives zeros for the others; the all-reduce that puts
        them together is SGLang's. Rows that the scheduler staged are whole, as SGLang has it.
        """

        def __init__(
            self, num_embeddings: int, dim: int, layer_id: int, column_bounds: tuple[int, ...]
        ) -> None:
            nn.Module.__init__(self)
            parallel = engram.get_parallel()
            self.dim = dim
            self.layer_id = layer_id
            self.num_embeddings = num_embeddings
            # Under DP attention a rank with staged rows would not join the collectives of one without: each takes all
            # rows of its own tokens, and waits for nobody.
            alone = parallel.attn_dp_size > 1
            self.tp_size = 1 if alone else parallel.tp_size
            self.row_start, row_end = engram.shard_range(
                num_embeddings, column_bounds, 0 if alone else parallel.tp_rank, self.tp_size
            )
            self.rows = row_end - self.row_start
            self.host_table = None
            self.peer = None
            self.staged_by_scheduler = False  # see _fill
            self._sort_host_reads = False
            self.columns = (
                bisect.bisect_right(column_bounds, self.row_start) - 1,
                bisect.bisect_left(column_bounds, row_end),
            )
            self._whole_columns = {self.row_start, row_end} <= set(column_bounds)
            self._source: RowSource | None = None
            self.hash_index = -1
            """Of the layer in the hash, from when the model has been loaded."""

        def forward(
            self, indices: Tensor, forward_batch: Any = None, *, cp_all_tokens: bool = False
        ) -> Tensor:
            """As SGLang's: bf16 [T, columns, dim] of ids [T, columns]."""
            with graphs.lookups_of(forward_batch):
                rows: Tensor = super().forward(indices, forward_batch, cp_all_tokens=cp_all_tokens)
            return rows

        def _owned_rows(self, indices: Tensor) -> Tensor:
            """bf16 [T, columns, dim] of ids [T, columns]: this rank's rows, zeros for the rest.

            In a breakable CUDA graph the rows of each replay are fetched between its segments; in a full one they have
            been staged before.
            """
            out: Tensor = self.new_rows(indices)
            fill(self, indices, out)
            return out

        def dequant_staged(self, rows: Any, scales: object, copied: object, hash_shape: torch.Size) -> Tensor:
            """Wait for what `RemoteRowStager.stage` asked for; rows past those are zeros."""
            found = rows.wait(self.layer_id).rows
            out = torch.zeros(*hash_shape, self.dim, dtype=torch.bfloat16, device=found.device)
            out[: len(found)] = found
            return out

        def _fill(self, indices: Tensor, out: Tensor) -> None:
            if self.rows == 0:
                out.zero_()
                return
            if _sglang_graphs.capturing(out):
                graphs.capture(self, indices, out)
                return
            staged = _staged_for_replay(engram)
            if staged is None:
                graphs.warm_up(self, indices)
                self.fetch(indices, out)
                return
            whole = self.dequant_staged(staged[self.layer_id][0], None, None, indices.shape)
            begin, end = self.columns
            out.zero_()
            out[:, begin:end] = whole[:, begin:end]
            if not self._whole_columns:
                out.masked_fill_(~self._owned(indices).unsqueeze(-1), 0)

        def fetch(self, indices: Tensor, out: Tensor) -> None:
            """Write this rank's rows of ids [T, columns] to `out`, bf16 [T, columns, dim], zeros for the rest."""
            begin, end = self.columns
            out[:, :begin] = 0
            out[:, end:] = 0
            if not self._whole_columns:
                indices = indices.masked_fill(~self._owned(indices), -1)
            if self._source is None:
                self._source = RowSource(
                    connect(), out.device, columns=self.columns, scale_rule=scale_rule(out.device)
                )
            self._source.fill({self.layer_id: Wanted(indices, out[:, begin:end])})

        def _owned(self, indices: Tensor) -> Tensor:
            owned: Tensor = (indices >= self.row_start) & (indices < self.row_start + self.rows)
            return owned

    def fill_now(embedding: Any, indices: Tensor, out: Tensor) -> None:
        embedding._fill(indices, out)

    def zeros(embedding: Any, indices: Tensor, out: Tensor) -> None:
        out.zero_()  # while a graph is captured its ids have not been computed

    fill = engram.eager_on_graph(capture_stub=zeros)(fill_now)
    return RemoteEngramEmbedding


def _staged_for_replay(engram: ModuleType) -> dict[int, Any] | None:
    """By layer, what the scheduler staged for the batch that a breakable CUDA graph replays now."""
    if not engram.is_in_breakable_cuda_graph():
        return None
    context = engram.get_tc_piecewise_forward_context()
    staged = None if context is None else context.forward_batch.engram_staged_rows
    return None if staged is None else {entry[1]: entry for entry in staged}


def stager_class(
    staging: ModuleType,
    embedding: type[nn.Module],
    connect: Callable[[], EngramClient],
    settings: Settings,
    graphs: FullGraphs,
) -> type[Any]:
    """An `EngramRowStager` that asks for rows instead of gathering them.

    staging: the module sglang.srt.layers.engram_staging. embedding: what `embedding_class` made.
    """

    class RemoteRowStager(staging.EngramRowStager):  # type: ignore[misc, name-defined]
        """Requests a prefill batch's rows before its forward, from the scheduler, and returns at once."""

        def __init__(
            self, hasher: Any, embeds: list[Any], device: torch.device, client: EngramClient
        ) -> None:
            self.hasher = hasher
            self.device = device
            self._layers = [embed.layer_id for embed in embeds]
            self._rows = RowPrefetcher(
                client, layers=self._layers, device=device, lane="prefill", scale_rule=scale_rule(device)
            )

        @classmethod
        def from_model(cls, model: nn.Module, hasher: Any, device: torch.device) -> Any:
            """A stager for a model that `embedding` serves; None when its rows are to be looked up in the forward.

            Shakes hands with the server: raises MismatchError when its rows are not the engine's. Raises RuntimeError
            when the model has tables after all.
            """
            modules = [part for part in model.modules() if isinstance(part, staging.Engram)]
            modules.sort(key=lambda module: module.layer_hash_index)
            embeds = [module.embed for module in modules]
            if not embeds:
                return None
            if not all(isinstance(embed, embedding) for embed in embeds):
                raise RuntimeError(
                    "SGLang has not applied engram-server's hook to EngramEmbedding (its log says why), and has made "
                    "Engram tables of its own: unset ENGRAM_SERVER_TARGET, or run SGLang 0.5.23"
                )
            for module in modules:
                module.embed.hash_index = module.layer_hash_index
            graphs.hasher = hasher
            client = connect()
            shake_hands(client, hasher, embeds, settings)
            # Off unless told otherwise for SGLang's own tables, on for ours. Prefill context parallelism hashes the
            # whole prompt and keeps a part of the rows.
            switch = staging.envs.SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING
            if (switch.is_set() and not switch.get()) or staging.get_parallel().attn_cp_size > 1:
                return None
            return cls(hasher, embeds, device, client)

        def stage(self, batch: Any) -> list[tuple[Any, int, None]] | None:
            """Per layer what `dequant_staged` takes; None to leave the lookup to the forward."""
            if not batch.forward_mode.is_extend_without_speculative():
                return None
            windows = self._windows(batch)
            if windows is None:
                return None
            ids, _ = self.hasher.hash_windows(*windows)
            # Whatever goes wrong is raised: ranks that fell back to the lookup, whose rows are added up over the ranks,
            # each by itself would wait for one another for ever.
            step = self._rows.prefetch_blocks(
                {layer: ids[:, index] for index, layer in enumerate(self._layers)}
            )
            return [(step, layer, None) for layer in self._layers]

    return RemoteRowStager


def shake_hands(client: EngramClient, hasher: Any, embeds: list[Any], settings: Settings) -> None:
    """Raise MismatchError unless the server's rows are those of this hasher and these tables."""
    description = client.describe()
    primes = hasher.primes.cpu().numpy()
    image = hasher.image_token_id
    facts = EngineFacts(
        rows={embed.layer_id: embed.num_embeddings for embed in embeds},
        head_dim=embeds[0].dim,
        token_map=hasher.token_map.cpu().numpy(),
        primes=primes.reshape(len(primes), -1).astype(np.int64),
        multipliers=hasher.multipliers.cpu().numpy(),
        pad_class=hasher.pad_id,
        # A text-only model knows no image token and hashes none; the server's is then as good as any.
        image_token_id=description.model.image_token_id if image is None else image,
    )
    _handshake.agree(description, facts, _model_path(), settings)


def _model_path() -> str:
    from sglang.srt.runtime_context import get_model

    return str(get_model().model_path)
