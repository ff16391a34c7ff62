"""vLLM's Engram modules without tables, and the step that brings their rows.

Built from vLLM's own classes when a model is made, since they cannot be imported before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engram_client._query import LookupMethods
from engram_client._result import Lookup
from engram_client.adapters._rows import RowSource, Wanted

Client = LookupMethods[Lookup]


def embedding_class(engram: ModuleType) -> type[nn.Module]:
    """A `ParallelEngramEmbedding` whose rows come from a server.

    engram: the module vllm.models.deepseek_v41.common.engram.
    """

    class RemoteEngramEmbedding(engram.ParallelEngramEmbedding):  # type: ignore[misc, name-defined]
        """One layer's table, elsewhere. No parameters: nothing is allocated, loaded or saved.

        What vLLM's modules read of a table is here; `forward` is vLLM's. dp_size is 1: every data-parallel replica
        asks for its own tokens, and exchanges nothing.
        """

        def __init__(
            self, client: Client, layer: int, head_sizes: Sequence[int], dim: int, *, cpu_offload: bool
        ) -> None:
            """cpu_offload: as EngramConfig has it; decides whether vLLM looks rows up on a stream of its own."""
            nn.Module.__init__(self)
            self.layer = layer
            self.dim = dim
            self.block_size = 32
            self.cpu_offload = cpu_offload
            self.dp_shared_memory = False
            self.use_thp = False
            self.dp_size = 1
            self.peer_rows = 0
            self.num_embeddings = sum(head_sizes)
            self.n_hash_cols = len(head_sizes)
            self.tp_size = engram.get_tensor_model_parallel_world_size()
            self.part_n_hash_cols = math.ceil(self.n_hash_cols / self.tp_size)
            self.head_start = engram.get_tensor_model_parallel_rank() * self.part_n_hash_cols
            self.columns = (
                self.head_start,
                min(self.head_start + self.part_n_hash_cols, self.n_hash_cols),
            )
            if self.head_start >= self.n_hash_cols:
                raise ValueError(
                    f"tensor_parallel_size {self.tp_size} leaves this rank none of the {self.n_hash_cols} columns of "
                    f"layer {layer}: choose a smaller one"
                )
            self._client = client
            self._source: RowSource | None = None

        def lookup(self, indices: Tensor, out: Tensor, background: bool = False) -> None:
            """As vLLM's: this rank's columns of `indices` [T, columns], -1 = zero row, to bf16 [T, C, 256] or
            packed FP8 uint8 [T, C, 264]. `background` has no meaning here.

            Raises RuntimeError inside a CUDA graph, which would keep these rows for ever; `EngramError`.
            """
            if out.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a CUDA graph is capturing an Engram lookup, whose rows come from a server and would be frozen: "
                    "unset ENGRAM_SERVER_LOOKUP, or start vLLM with --enforce-eager"
                )
            if self._source is None or self._source.columns != self.columns:
                self._source = RowSource(self._client, out.device, columns=self.columns)
            self._source.fill({self.layer: Wanted(indices, out)})

        def extra_repr(self) -> str:
            """For print(model)."""
            return f"layer={self.layer}, {self.num_embeddings}, {self.dim}, columns={self.columns}"

    return RemoteEngramEmbedding


@contextmanager
def tables_elsewhere(engram: ModuleType, client: Client, *, staged: bool) -> Iterator[None]:
    """While it is open, `Engram` makes embeddings without tables."""
    embedding = embedding_class(engram)
    plain = engram.Engram._create_embedding

    def create_embedding(module: Any, layout: Any, layer_hash_index: int) -> nn.Module:
        offload = engram.get_current_vllm_config().engram_config.cpu_offload
        return embedding(
            client,
            layout.layer_ids[layer_hash_index],
            [size for order in layout.primes[layer_hash_index] for size in order],
            layout.head_dim,
            # Staged rows are there before the forward: no stream of vLLM's own, no event to wait for.
            cpu_offload=bool(offload) and not staged,
        )

    engram.Engram._create_embedding = create_embedding
    try:
        yield
    finally:
        engram.Engram._create_embedding = plain


class RowStager:
    """Brings the rows of a step to the staging buffers of a rank's Engram layers, before its forward.

    The buffers keep their addresses, so that CUDA graphs that read them see each step's rows. A forward whose rows have
    not been staged fails, rather than use those of another step.
    """

    def __init__(
        self, modules: Mapping[int, Any], hash_state: Any, image_token_id: int, client: Client
    ) -> None:
        """modules: vLLM's `Engram` modules of this rank, by layer. hash_state: its `NgramHashState`."""
        first = next(iter(modules.values()))
        self._modules = modules
        self._hash = hash_state
        self._image_token_id = image_token_id
        self._source = RowSource(client, first.staged_rows.device, columns=first.embed_tokens.columns)
        self._staged_tokens = 0
        for module in modules.values():
            module.staged_rows.zero_()  # warm-up and capture run on them: finite
            module.prepare_embeddings = self._prepared

    def stage(self, batch: Any, lookback: Tensor) -> None:
        """Fetch the rows of an `InputBatch`; those of its padding become zeros.

        lookback: int32 [requests or more, 3], ids before each request's chunk, newest first, -1 = none or unknown.
        Raises `EngramError`; the step then has no rows.
        """
        self._staged_tokens = 0
        padded = batch.num_tokens_after_padding
        hashes = self._hashes(batch, lookback)
        self._source.fill(
            {
                layer: Wanted(hashes[:, module.layer_hash_index], module.staged_rows[:padded])
                for layer, module in self._modules.items()
            }
        )
        self._staged_tokens = padded

    def stage_zeros(self, tokens: int) -> None:
        """For a batch without requests: a warm-up, a capture, a data-parallel replica that has nothing to do."""
        for module in self._modules.values():
            module.staged_rows[:tokens] = 0
        self._staged_tokens = tokens

    def _hashes(self, batch: Any, lookback: Tensor) -> Tensor:
        """int32 [tokens, layers, columns], by vLLM's own kernel, which the forward runs again."""
        tokens = batch.input_ids[: batch.num_tokens]
        hashes: Tensor = self._hash(
            tokens,
            batch.positions[: batch.num_tokens],
            batch.query_start_loc[: batch.num_reqs + 1],
            tokens == self._image_token_id,
            lookback,
            lookback == self._image_token_id,
            None,
            None,
        )
        return hashes

    def _prepared(self, hash_ids: Tensor) -> None:
        """In place of `Engram.prepare_embeddings`. A CUDA graph does not run it again, and need not."""
        capturing = hash_ids.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing and hash_ids.shape[0] > self._staged_tokens:
            raise RuntimeError(
                f"a forward of {hash_ids.shape[0]} tokens has Engram rows staged for {self._staged_tokens}: the model "
                "state's prepare_inputs did not run before it"
            )


def state_class(plain: type[Any], stager: RowStager) -> type[Any]:
    """`plain`, vLLM's model state of this model, staging rows with each step's inputs."""

    class EngramServerModelState(plain):  # type: ignore[misc]
        """Stages Engram rows before each forward."""

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Tensor | None]:
            inputs: dict[str, Tensor | None] = super().prepare_inputs(input_batch, req_states)
            if any(request in req_states.req_id_to_index for request in input_batch.req_ids):
                stager.stage(input_batch, self.lookback_token_ids)
            else:
                stager.stage_zeros(input_batch.num_tokens_after_padding)
            return inputs

        def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
            inputs: dict[str, Any] = super().prepare_dummy_inputs(num_reqs, num_tokens)
            stager.stage_zeros(num_tokens)
            return inputs

    return EngramServerModelState
