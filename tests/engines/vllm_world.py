"""vLLM's own Engram modules, model state and kernels on a CPU, around a model of two Engram layers and nothing else.

Real: EngramLayout, NgramHashState, Engram, ParallelEngramEmbedding, DeepseekV41ModelState and the states it derives
from, InputBatch, CUDAGraphMode, and their kernels. Stubbed: everything below and beside them.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language
from seams import segment
from torch import Tensor, nn
from wheel import Tokenizer, Wheel, maps_once

from engram_client.adapters.vllm import ARCHITECTURE
from engram_server.spec import EngramSpec
from engram_server.tokens import find_tokenizer

ENGRAM = "vllm.models.deepseek_v41.common.engram"
STATE = "vllm.models.deepseek_v41.nvidia.model_state"
MAX_TOKENS = 96
"""max_num_batched_tokens: rows of a staging buffer."""
MAX_REQUESTS = 6
MAX_LENGTH = 256

WHEEL = Wheel(
    "vllm",
    [
        ENGRAM,
        STATE,
        "vllm.models.deepseek_v41.common.mm_preprocess",
        "vllm.models.deepseek_v41.common.ops.query_quant",
        "vllm.v1.worker.gpu.model_states.interface",
        "vllm.v1.worker.gpu.model_states.default",
        "vllm.v1.worker.gpu.input_batch",
        "vllm.compilation.breakable_cudagraph",
    ],
    absent=("transformers", "PIL", "regex"),
)


@dataclass
class World:
    """What vLLM's processes would know of each other: read by the stubs."""

    config: Any = None
    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    breakable: bool = True
    registered: dict[str, str] = field(default_factory=dict)


WORLD = World()


class _Linear(nn.Module):
    """Keys and values that a test can follow: the flattened rows themselves."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, rows: Tensor) -> Tensor:
        return rows


class _Interpreted:
    """A kernel whose Python booleans become numbers: Triton's interpreter cannot pass them as arguments."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        launch = self._kernel[grid]
        return lambda *args, SORTED, **kwargs: launch(*args, SORTED=int(SORTED), **kwargs)  # noqa: N803


class Scheduler:
    """Requests, as they arrive."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.requests.append(request)


_modes: dict[str, Any] = {"enum": enum}
exec(segment("vllm.config.compilation", "CUDAGraphMode"), _modes)
CUDAGraphMode = _modes["CUDAGraphMode"]


def _current_platform() -> SimpleNamespace:
    no = {name: lambda *_: False for name in ("is_cuda", "is_rocm", "is_cuda_alike", "is_xpu")}
    return SimpleNamespace(**no, is_device_capability_family=lambda *_: False)


def _set_attrs(parameter: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


class _Model(nn.Module):
    """In the place of vLLM's DeepseekV41ForCausalLM: its Engram layers and its hash, made by the real classes."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        engram = WHEEL.load(ENGRAM)
        config = vllm_config.model_config.hf_config
        layout = engram.EngramLayout.from_config(config)
        self.layers = nn.ModuleDict(
            {
                str(layer): engram.Engram(config, None, layout, index, False, prefix=f"layers.{layer}.engram")
                for index, layer in enumerate(layout.layer_ids)
            }
        )
        swa = SimpleNamespace(block_size=64, kv_cache=torch.zeros(8, 64))
        self.engram_hash = engram.NgramHashState(vllm_config, layout, swa)

    @property
    def token_lookback_depth(self) -> int:
        return self.engram_hash.lookback_depth

    def get_model_state_cls(self) -> type[Any]:
        state: type[Any] = WHEEL.load(STATE).DeepseekV41ModelState
        return state

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in weights}


def _stub() -> None:
    for path, value in {
        "vllm.ModelRegistry": SimpleNamespace(register_model=WORLD.registered.__setitem__),
        "vllm.platforms.current_platform": _current_platform(),
        "vllm.triton_utils.triton": triton,
        "vllm.triton_utils.tl": triton.language,
        "vllm.utils.math_utils.cdiv": triton.cdiv,
        "vllm.logger.init_logger": logging.getLogger,
        "vllm.envs.VLLM_USE_BREAKABLE_CUDAGRAPH": True,
        "vllm.config.get_current_vllm_config": lambda: WORLD.config,
        "vllm.config.CUDAGraphMode": CUDAGraphMode,
        "vllm.distributed.get_tensor_model_parallel_world_size": lambda: WORLD.tp_size,
        "vllm.distributed.get_tensor_model_parallel_rank": lambda: WORLD.tp_rank,
        "vllm.distributed.get_engram_dp_size": lambda: WORLD.dp_size,
        "vllm.distributed.get_engram_dp_group": lambda: None,
        "vllm.forward_context.is_forward_context_available": lambda: False,
        "vllm.model_executor.layers.linear.ColumnParallelLinear": _Linear,
        "vllm.model_executor.utils.set_weight_attrs": _set_attrs,
        "vllm.models.deepseek_v41.DeepseekV41ForCausalLM": _Model,
        "vllm.v1.core.sched.scheduler.Scheduler": Scheduler,
        "vllm.v1.worker.gpu.mm.rope.get_rope_state": lambda *_, **__: None,
        "vllm.v1.worker.gpu.model_states.mm_pruning.maybe_create_mm_pruner": lambda *_, **__: None,
        "transformers.AutoTokenizer": SimpleNamespace(
            from_pretrained=lambda path, **_: Tokenizer.of(Path(path))
        ),
    }.items():
        WHEEL.set(path, value)
    _Model.__name__ = ARCHITECTURE
    engram = WHEEL.load(ENGRAM)
    engram._engram_lookup_kernel = _Interpreted(engram._engram_lookup_kernel)
    maps_once(engram)
    # For ParallelEngramEmbedding, which sizes its grid by the GPU.
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=4)  # type: ignore[assignment]
    WHEEL.load("vllm.compilation.breakable_cudagraph").is_breakable_cudagraph_enabled = lambda: (
        WORLD.breakable
    )


_stub()


def vllm_config(checkpoint: Path, **changes: Any) -> SimpleNamespace:
    """A VllmConfig of a checkpoint. changes: dp, pcp, v2, mode (of CUDA graphs), offload, across_dp."""
    config = json.loads((checkpoint / "config.json").read_text())
    defaults = {"hc_mult": 4, "rms_norm_eps": 1e-20}
    hf = SimpleNamespace(**{**defaults, **config["text_config"], "hidden_size": 32})
    tokenizer = find_tokenizer(checkpoint, None, EngramSpec.from_file(checkpoint))
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(checkpoint),
            hf_config=hf,
            tokenizer=str(tokenizer),
            trust_remote_code=False,
            revision=None,
            enable_prompt_embeds=False,
            get_inputs_embeds_size=lambda: 32,
            dtype=torch.bfloat16,
            max_model_len=MAX_LENGTH,
        ),
        engram_config=SimpleNamespace(
            cpu_offload=changes.get("offload", True),
            embedding_across_dp=changes.get("across_dp", False),
            dp_shared_memory=True,
            use_thp=True,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=changes.get("dp", 1), prefill_context_parallel_size=changes.get("pcp", 1)
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode[changes.get("mode", "FULL_AND_PIECEWISE")],
            cudagraph_decoder_replay=False,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_REQUESTS),
        use_v2_model_runner=changes.get("v2", True),
    )
    WORLD.config = made
    return made


def input_batch(chunks: Sequence[tuple[int, int, Sequence[int]]], padded: int) -> Any:
    """An InputBatch of chunks (request's index, position of the first token, token ids), one behind the other.

    padded: tokens after padding; what lies behind the chunks is left from an earlier step.
    """
    module = WHEEL.load("vllm.v1.worker.gpu.input_batch")
    buffers = module.InputBuffers(MAX_REQUESTS, MAX_TOKENS, torch.device("cpu"))
    batch = module.InputBatch.make_dummy(len(chunks), max(padded, len(chunks)), buffers)
    lengths = [len(tokens) for _, _, tokens in chunks]
    bounds = np.cumsum([0, *lengths])
    batch.req_ids = [f"request {index}" for index, _, _ in chunks]
    batch.num_tokens, batch.num_tokens_after_padding = int(bounds[-1]), padded
    batch.idx_mapping = torch.tensor([index for index, _, _ in chunks])
    batch.query_start_loc = torch.from_numpy(bounds.astype(np.int32))
    batch.input_ids = torch.full((padded,), 7, dtype=torch.int32)
    batch.positions = torch.full((padded,), 3, dtype=torch.int64)
    for (_, start, tokens), begin in zip(chunks, bounds, strict=False):
        batch.input_ids[begin : begin + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        batch.positions[begin : begin + len(tokens)] = torch.arange(start, start + len(tokens))
    return batch


class Requests:
    """In the place of RequestState: the accepted tokens of each request."""

    def __init__(self) -> None:
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(MAX_REQUESTS, MAX_LENGTH, dtype=torch.int32))
        self.req_id_to_index = {f"request {index}": index for index in range(MAX_REQUESTS)}

    def accept(self, request: int, tokens: Sequence[int]) -> None:
        """These are the request's tokens from its first on."""
        self.all_token_ids.gpu[request, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
