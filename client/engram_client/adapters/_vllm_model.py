"""vLLM's model made without tables, and what it derives compared with what the server serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from engram_client.adapters import _handshake, _vllm_engram
from engram_client.adapters._handshake import EngineFacts
from engram_client.adapters._settings import Settings

_log = logging.getLogger("vllm.engram_server")
"""vLLM shows what is logged below its own name."""


def build(
    model: Any, make: Callable[[], None], config: Any, settings: Settings
) -> _vllm_engram.RowStager | None:
    """Run the model's constructor, `make`, with Engram modules that hold no tables; then shake hands.

    Returns what stages the rows of each step: None when they are looked up inline, or when this pipeline stage has no
    Engram layer. Raises MismatchError when the server's rows are not the engine's, UnavailableError when there is no
    server.
    """
    from vllm.models.deepseek_v41.common import engram
    from vllm.models.deepseek_v41.common.mm_preprocess import IMAGE_SENTINEL_BASE_ID

    client = settings.client()
    staged = settings.lookup == "staged"
    with _vllm_engram.tables_elsewhere(engram, client, staged=staged):
        make()
    hash_states = [part for part in model.modules() if isinstance(part, engram.NgramHashState)]
    if not hash_states:
        client.close()
        return None
    facts = facts_of(hash_states[0], IMAGE_SENTINEL_BASE_ID)
    _handshake.agree(client.describe(), facts, config.model_config.model, settings, _log)
    if not staged:
        return None
    modules = {part.embed_tokens.layer: part for part in model.modules() if isinstance(part, engram.Engram)}
    return _vllm_engram.RowStager(modules, hash_states[0], IMAGE_SENTINEL_BASE_ID, client)


def facts_of(hash_state: Any, image_token_id: int) -> EngineFacts:
    """What a `NgramHashState` was made of."""
    layout = hash_state.layout
    primes = hash_state.primes.cpu().numpy()
    return EngineFacts(
        rows=dict(zip(layout.layer_ids, layout.num_embeddings, strict=True)),
        head_dim=layout.head_dim,
        token_map=hash_state.token_map.cpu().numpy(),
        primes=primes.reshape(len(primes), -1).astype(np.int64),
        multipliers=hash_state.multipliers.cpu().numpy(),
        pad_class=hash_state.pad_id,
        image_token_id=image_token_id,
    )
