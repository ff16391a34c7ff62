"""SGLang's own Engram modules on a CPU.

Real: EngramLayout, EngramHasher, EngramEmbedding, Engram, EngramRowStager, ForwardMode, the hook registry, and what
breaks a CUDA graph. Stubbed: everything below and beside them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from seams import segment
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from wheel import Tokenizer, Wheel, maps_once

from engram_server.spec import EngramSpec
from engram_server.tokens import find_tokenizer

ENGRAM = "sglang.srt.layers.engram"
STAGING = "sglang.srt.layers.engram_staging"
BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
FULL = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
PAD_SHIFT = 1_000_000

WHEEL = Wheel(
    "sglang",
    [
        ENGRAM,
        STAGING,
        BREAKS,
        FULL,
        "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend",
        "sglang.srt.environ",
        "sglang.srt.plugins.hook_registry",
        "sglang.srt.model_executor.encoder_swa_replay",
    ],
    absent=("cuda",),
)


@dataclass
class World:
    """What SGLang's runtime context would say."""

    tp_size: int = 1
    tp_rank: int = 0
    attn_dp_size: int = 1
    in_breakable_graph: bool = False
    forward_context: Any = None
    checkpoint: Path = Path()


WORLD = World()

_modes: dict[str, Any] = {"IntEnum": IntEnum, "auto": auto}
exec(segment("sglang.srt.model_executor.forward_batch_info", "ForwardMode"), _modes)
ForwardMode = _modes["ForwardMode"]


class DeepseekV4ForCausalLM:
    """Takes weights."""

    def load_weights(self, weights: Any, is_nextn: bool = False) -> set[str]:
        return {name for name, _ in weights}


class Scheduler:
    """Requests, as they are queued."""

    def __init__(self) -> None:
        self.queued: list[Any] = []

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self.queued.append(req)


def _parallel() -> SimpleNamespace:
    return SimpleNamespace(
        tp_size=WORLD.tp_size,
        tp_rank=WORLD.tp_rank,
        attn_tp_rank=WORLD.tp_rank,
        attn_dp_size=WORLD.attn_dp_size,
        attn_cp_size=1,
        tp_group=MagicMock(),
    )


def _alone(*_: Any, **__: Any) -> None:
    raise AssertionError("there is no other rank")


class DefaultModelLoader:
    """Names a checkpoint's files."""

    def _prepare_weights(self, folder: str) -> tuple[str, list[str], bool]:
        return folder, sorted(map(str, Path(folder).glob("*.safetensors"))), True


def _stub() -> None:
    context = "sglang.srt.model_executor.runner_backend_utils"
    for path, value in {
        "sglang.srt.distributed.tensor_model_parallel_all_reduce": _alone,
        "sglang.srt.layers.dp_attention.dp_gather_replicate": _alone,
        "sglang.srt.utils.is_cuda": lambda: False,
        "sglang.srt.utils.is_hip": lambda: False,
        "sglang.srt.utils.is_xpu": lambda: False,
        "sglang.srt.utils.is_gfx95_supported": lambda: False,
        "sglang.kernels.ops.quantization.fp4_fake_quant.FP8_BLOCK_SIZE": 32,
        "sglang.srt.managers.schedule_batch.MM_PAD_SHIFT_VALUE": PAD_SHIFT,
        "sglang.srt.runtime_context.get_parallel": _parallel,
        "sglang.srt.runtime_context.get_model": lambda: SimpleNamespace(model_path=str(WORLD.checkpoint)),
        f"{context}.breakable_cuda_graph.context.is_in_breakable_cuda_graph": (
            lambda: WORLD.in_breakable_graph
        ),
        f"{context}.tc_piecewise_cuda_graph.get_tc_piecewise_forward_context": (
            lambda: WORLD.forward_context
        ),
        "sglang.srt.model_executor.runner_utils.pool.GraphPoolPrecarve": MagicMock,
        "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter": SimpleNamespace(
            create=lambda enable: None
        ),
        "sglang.srt.models.deepseek_v4.DeepseekV4ForCausalLM": DeepseekV4ForCausalLM,
        "sglang.srt.managers.scheduler.Scheduler": Scheduler,
        "sglang.srt.model_loader.loader.DefaultModelLoader": DefaultModelLoader,
    }.items():
        WHEEL.set(path, value)
    for number, name in enumerate(("MODE_DECODE", "MODE_VERIFY", "MODE_EXTEND")):
        WHEEL.set(f"sglang.kernels.ops.embeddings.engram_hash.{name}", number)
    maps_once(WHEEL.load(ENGRAM))


_stub()


class Model(torch.nn.Module):
    """SGLang's hasher and its Engram embeddings of a checkpoint, by whatever class stands for EngramEmbedding now."""

    def __init__(self, checkpoint: Path, image_token_id: int | None = 129264) -> None:
        super().__init__()
        engram = WHEEL.load(ENGRAM)
        text = json.loads((checkpoint / "config.json").read_text())["text_config"]
        config = SimpleNamespace(**text)
        self.layout = engram.EngramLayout.from_config(config)
        path = find_tokenizer(checkpoint, None, EngramSpec.from_file(checkpoint))
        assert path is not None
        self.hasher = engram.EngramHasher(
            self.layout,
            Tokenizer.of(path),
            config.engram_pad_token_id,
            config.engram_compressed_vocab_size,
        )
        self.hasher.image_token_id = image_token_id
        self.hasher.init_history(8, "cpu")
        self.engrams = torch.nn.ModuleList(
            _engram(engram, self.layout, layer, index) for index, layer in enumerate(self.layout.layer_ids)
        )
        WORLD.checkpoint = checkpoint


def _engram(engram: Any, layout: Any, layer: int, index: int) -> Any:
    """An `Engram` without what follows its rows."""
    module = engram.Engram.__new__(engram.Engram)
    torch.nn.Module.__init__(module)
    module.layer_hash_index = index
    module.embed = engram.EngramEmbedding(
        layout.num_embeddings[index], layout.head_dim, layer, column_bounds=layout.column_bounds(index)
    )
    return module


def forward_batch(
    mode: Any, chunks: Sequence[tuple[int, int, Sequence[int]]], **more: Any
) -> SimpleNamespace:
    """A ForwardBatch of chunks (request slot, position of the first token, ids)."""
    lengths = [len(tokens) for _, _, tokens in chunks]
    return SimpleNamespace(
        forward_mode=mode,
        input_ids=torch.tensor([token for _, _, tokens in chunks for token in tokens]),
        positions=torch.cat([torch.arange(start, start + len(tokens)) for _, start, tokens in chunks]),
        req_pool_indices=torch.tensor([slot for slot, _, _ in chunks]),
        extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=lengths,
        extend_start_loc=torch.tensor(np.cumsum([0, *lengths[:-1]])),
        out_cache_loc=torch.arange(1, sum(lengths) + 1),
        **{"engram_history": None, "engram_staged_rows": None, "spec_info": None, **more},
    )


def schedule_batch(chunks: Sequence[tuple[Sequence[int], int, int]]) -> SimpleNamespace:
    """A ScheduleBatch that extends requests (all ids, begin, end)."""
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=[SimpleNamespace(full_untruncated_fill_ids=list(ids)) for ids, _, _ in chunks],
        prefix_lens=[begin for _, begin, _ in chunks],
        extend_lens=[end - begin for _, begin, end in chunks],
        encoder_swa_reset=None,
    )


class Graph(TorchDispatchMode):
    """In the place of a CUDA graph: operators on tensors, run again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait for a number"
        result = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FullGraphs:
    """SGLang's own backend of full CUDA graphs, with graphs of a CPU."""

    def __init__(self, monkeypatch: Any, capturing: Any) -> None:
        """capturing: the name of the product's function that tells whether a graph is captured."""
        self._captures = False
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(capturing, lambda _: self._captures)
        device = SimpleNamespace(synchronize=lambda: None, graph=self._capture)
        self.backend = WHEEL.load(FULL).FullCudaGraphBackend(SimpleNamespace(device_module=device))

    @contextmanager
    def _capture(self, cuda_graph: Graph, pool: Any, stream: Any) -> Any:
        self._captures = True
        try:
            with cuda_graph:
                yield
        finally:
            self._captures = False


class Capture:
    """In the place of a breakable CUDA graph's capture: remembers what runs between its segments."""

    def __init__(self) -> None:
        self.cuda_graph = SimpleNamespace(_break_fns=[])
        self._barrier_fn = None

    def _end_current_segment(self) -> None:
        pass

    def _begin_new_segment(self) -> None:
        pass

    def replay(self) -> None:
        for between in self.cuda_graph._break_fns:
            between()


@contextmanager
def capturing() -> Any:
    """While it is open, SGLang captures a breakable CUDA graph."""
    breaks = WHEEL.load(BREAKS)
    breaks._weak_ref_if_tensor = lambda argument: argument
    token = breaks._current_capture_var.set(capture := Capture())
    try:
        yield capture
    finally:
        breaks._current_capture_var.reset(token)
