"""vLLM without Engram tables: `vllm serve` takes the rows of DeepSeek-V4.1 from a server.

    ENGRAM_SERVER_TARGET=unix:/run/engram.sock vllm serve deepseek-ai/DeepSeek-V4.1-Flash

vLLM finds `register` through the entry point of the group vllm.general_plugins and calls it in each of its processes.
Written for vLLM 0.33: what it relies on there, `tests/engines` checks against the wheel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from engram_client.adapters._settings import Settings
from engram_client.adapters._tables import is_table

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE = "DeepseekV41ForCausalLM"


def register() -> None:
    """The entry point. Does nothing unless ENGRAM_SERVER_TARGET is set. Raises ValueError for settings in error."""
    settings = Settings.from_environment()
    if settings is None:
        return
    from vllm import ModelRegistry

    # By name: a model's module must not be imported before its process is forked.
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:{ARCHITECTURE}")
    if settings.prefetch:
        _prefetch_prompts(settings)


def __getattr__(name: str) -> Any:
    # Imports vLLM's model, and with it CUDA: only when vLLM resolves what `register` named.
    if name == ARCHITECTURE:
        return _model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def refuse_unsuited(config: Any, settings: Settings) -> None:
    """Raise ValueError, naming the setting to change, for a VllmConfig under which rows would be frozen or bypassed.

    It also turns off what only tables of the engine's own need: memory shared by replicas, and huge pages.
    """
    engram, parallel = config.engram_config, config.parallel_config
    if engram is None:
        return  # a model of this architecture without Engram layers
    if engram.embedding_across_dp and parallel.data_parallel_size > 1:
        raise ValueError(
            "embedding_across_dp shards the Engram tables over data-parallel ranks, which exchange rows among "
            "themselves; there are no tables to shard: set --engram-config '{\"embedding_across_dp\": false}'"
        )
    if settings.lookup == "staged":
        _refuse_unstaged(config)
    else:
        _refuse_captured(config)
    engram.dp_shared_memory = False
    engram.use_thp = False


def _refuse_unstaged(config: Any) -> None:
    if not config.use_v2_model_runner:
        raise ValueError(
            "vLLM's V1 model runner has no place to fetch rows before a forward: set VLLM_USE_V2_MODEL_RUNNER=1, "
            "or ENGRAM_SERVER_LOOKUP=inline with --enforce-eager"
        )
    if config.parallel_config.prefill_context_parallel_size > 1:
        raise ValueError(
            "prefill context parallelism splits a chunk between ranks, whose rows are not staged: set "
            "--prefill-context-parallel-size 1"
        )


def _refuse_captured(config: Any) -> None:
    mode = config.compilation_config.cudagraph_mode
    if mode.has_full_cudagraphs():
        raise ValueError(
            f"cudagraph_mode {mode.name} captures whole forwards, and would freeze rows that are looked up inside "
            'them: unset ENGRAM_SERVER_LOOKUP, or set --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )
    if not mode.has_piecewise_cudagraphs():
        return
    if not config.engram_config.cpu_offload:
        raise ValueError(
            "cpu_offload=false lets piecewise CUDA graphs capture the Engram lookup, and would freeze its rows: unset "
            "ENGRAM_SERVER_LOOKUP, or set --engram-config '{\"cpu_offload\": true}'"
        )
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    if not is_breakable_cudagraph_enabled():
        raise ValueError(
            "piecewise CUDA graphs capture the Engram lookup unless they are breakable: unset ENGRAM_SERVER_LOOKUP, or "
            "set VLLM_USE_BREAKABLE_CUDAGRAPH=1"
        )


@functools.cache
def _model_class() -> type[Any]:
    from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM as Plain

    from engram_client.adapters import _vllm_engram
    from engram_client.adapters._vllm_model import build

    # vLLM goes by the class's name in places.
    class DeepseekV41ForCausalLM(Plain):  # type: ignore[misc]
        """vLLM's model, with rows from a server in place of its Engram tables."""

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            settings = Settings.required()
            refuse_unsuited(vllm_config, settings)
            super_init = functools.partial(super().__init__, vllm_config=vllm_config, prefix=prefix)
            self.engram_stager = build(self, super_init, vllm_config, settings)

        def get_model_state_cls(self) -> type[Any]:
            plain: type[Any] = super().get_model_state_cls()
            stager = self.engram_stager
            return plain if stager is None else _vllm_engram.state_class(plain, stager)

        def is_unused_checkpoint_weight(self, name: str) -> bool:
            return is_table(name)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded: set[str] = super().load_weights(
                (name, tensor) for name, tensor in weights if not is_table(name)
            )
            return loaded

    return DeepseekV41ForCausalLM


def _prefetch_prompts(settings: Settings) -> None:
    """Have the scheduler hand each new request's prompt over as it arrives."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from engram_client.adapters._prompts import PromptPrefetcher

    plain = Scheduler.add_request
    if hasattr(plain, "engram_server"):
        return  # vLLM may load its plugins more than once
    prefetcher = PromptPrefetcher(settings.client)

    @functools.wraps(plain)
    def add_request(self: Any, request: Any) -> None:
        prefetcher.prompt(request.prompt_token_ids)
        plain(self, request)

    add_request.engram_server = True  # type: ignore[attr-defined]
    Scheduler.add_request = add_request
