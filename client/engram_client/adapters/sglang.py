"""SGLang without Engram tables: `sglang serve` takes the rows of DeepSeek-V4.1 from a server.

    ENGRAM_SERVER_TARGET=unix:/run/engram.sock sglang serve --model-path deepseek-ai/DeepSeek-V4.1-Flash

SGLang finds `register` through the entry point of the group sglang.srt.plugins and calls it in each of its processes.
Written for SGLang 0.5.23: what it relies on there, `tests/engines` checks against the wheel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from engram_client.adapters._settings import Settings
from engram_client.adapters._tables import is_table, without_tables

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_HASHES_FROM = 1_000_000
"""SGLang gives the positions of each image a number of their own, from here on, in the place of the image token."""


def register() -> None:
    """The entry point. Does nothing unless ENGRAM_SERVER_TARGET is set.

    SGLang logs what a plugin raises and goes on, with tables of its own that may not fit: hence SystemExit, for
    settings in error and for an SGLang that is not as the plugin knows it.
    """
    try:
        settings = Settings.from_environment()
        if settings is not None:
            _hook(settings)
    except (ValueError, ImportError, AttributeError) as error:
        raise SystemExit(f"engram-server's plugin cannot work in this SGLang: {error}") from error


def _hook(settings: Settings) -> None:
    from sglang.srt.layers import engram, engram_staging
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from engram_client.adapters import _sglang_engram
    from engram_client.adapters._sglang_graphs import FullGraphs

    connect = functools.cache(settings.client)  # one for all: each takes shared memory of the server
    graphs = FullGraphs(engram.MODE_DECODE, engram.MODE_VERIFY)
    embedding = _sglang_engram.embedding_class(engram, connect, graphs)
    stager = _sglang_engram.stager_class(engram_staging, embedding, connect, settings, graphs)
    HookRegistry.register("sglang.srt.layers.engram.EngramEmbedding", embedding, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.engram_staging.EngramRowStager", stager, HookType.REPLACE)
    backend = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
    HookRegistry.register(f"{backend}.capture_one", graphs.capture_one, HookType.AROUND)
    HookRegistry.register(f"{backend}.replay", graphs.replay, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.models.deepseek_v4.DeepseekV4ForCausalLM.load_weights", _load_no_table, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights", _read_no_table, HookType.AROUND
    )
    if settings.prefetch:
        HookRegistry.register(
            "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
            _prompts_to(connect),
            HookType.AROUND,
        )


def _load_no_table(
    load_weights: Callable[..., Any],
    model: Any,
    weights: Iterable[tuple[str, Tensor]],
    *args: Any,
    **named: Any,
) -> Any:
    kept = ((name, tensor) for name, tensor in weights if not is_table(name))
    return load_weights(model, kept, *args, **named)


def _read_no_table(
    prepare: Callable[..., tuple[str, list[str], bool]], loader: Any, *args: Any, **named: Any
) -> tuple[str, list[str], bool]:
    folder, files, safetensors = prepare(loader, *args, **named)
    return folder, without_tables(files) if safetensors else files, safetensors


def _prompts_to(connect: Callable[[], Any]) -> Callable[..., Any]:
    """Hand each new request's prompt over as it is queued; one rank of those that see it."""
    from sglang.srt.runtime_context import get_parallel

    from engram_client.adapters._prompts import PromptPrefetcher

    prefetcher = PromptPrefetcher(connect, image_hashes_from=IMAGE_HASHES_FROM)

    def add_request(plain: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **named: Any) -> Any:
        if get_parallel().attn_tp_rank == 0:
            prefetcher.prompt(req.origin_input_ids)
        return plain(scheduler, req, *args, **named)

    return add_request
