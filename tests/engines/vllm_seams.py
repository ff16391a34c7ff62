"""vLLM 0.33 as the plugin knows it."""

from seams import Seam

ENGRAM = "vllm.models.deepseek_v41.common.engram"
MODEL = "vllm.models.deepseek_v41.nvidia.model"
STATE = "vllm.models.deepseek_v41.nvidia.model_state"

SEAMS = [
    Seam(
        ENGRAM,
        "Engram._create_embedding",
        "self layout layer_hash_index",
        why="it is replaced while a model is made, so that no table is",
    ),
    Seam(
        ENGRAM,
        "Engram.__init__",
        uses=("self.embed_tokens = self._create_embedding(layout, layer_hash_index)", "self._init_staging("),
        why="it makes the embedding before the staging buffer",
    ),
    Seam(
        ENGRAM,
        "Engram._init_staging",
        "self max_tokens head_dim",
        uses=(
            "self.embed_tokens.part_n_hash_cols",
            "if not self.embed_tokens.cpu_offload: self._prefetch_stream = None return",
        ),
        why="staged_rows keeps its address, and without cpu_offload there is no event to wait for",
    ),
    Seam(
        ENGRAM,
        "Engram.prepare_embeddings",
        "self hash_ids",
        uses=("self.embed_tokens.lookup(hash_ids, rows)",),
        why="rows that are staged already must not be looked up",
    ),
    Seam(
        ENGRAM,
        "Engram._start_prefetch",
        "self hash_ids rows",
        "eager_break_during_capture",
        ("self.embed_tokens.lookup(hash_ids, rows, background=True)",),
        "an inline lookup runs between the segments of a breakable CUDA graph",
    ),
    Seam(
        ENGRAM,
        "Engram._ready_rows",
        "self num_tokens",
        uses=("if self._prefetch_done is not None:", "return self.staged_rows[:num_tokens]"),
        why="layers read their rows from staged_rows",
    ),
    Seam(
        ENGRAM,
        "ParallelEngramEmbedding.lookup",
        "self indices out background",
        why="it is overridden",
    ),
    Seam(
        ENGRAM,
        "ParallelEngramEmbedding.forward",
        "self indices",
        uses=("self.lookup(indices, out)", "tensor_model_parallel_all_gather(out, dim=1)"),
        why="it is inherited",
    ),
    Seam(
        ENGRAM,
        "EngramBatch.create",
        "cls layers max_tokens",
        "classmethod",
        ("table.dp_size == 1", "return None"),
        "with dp_size 1 no replica reads another's table",
    ),
    Seam(
        ENGRAM,
        "NgramHashState.forward",
        "self input_ids positions query_start_loc dead_mask lookback_token_ids lookback_dead_mask slot_mapping "
        "block_table",
        why="a step's row ids are hashed by it",
    ),
    Seam(
        ENGRAM,
        "NgramHashState.__init__",
        uses=(
            "self.pad_id =",
            'self.register_buffer("token_map"',
            'self.register_buffer("primes"',
            '"multipliers", multipliers',
        ),
        why="the handshake compares them",
    ),
    Seam(
        MODEL,
        "DeepseekV4Model.forward",
        uses=(
            "image_mask = image_sentinel_mask(input_ids)",
            "engram.prepare_embeddings(gathered_hashes[:, engram.layer_hash_index])",
            "dp_shared_memory=self.engram_dp_shared_memory",
        ),
        why="rows are staged for the ids that it hashes",
    ),
    Seam(
        MODEL,
        "DeepseekV4Model.__init__",
        uses=("self.engram_dp_shared_memory = engram.embed_tokens.dp_size == 1",),
        why="hashes are not gathered over replicas",
    ),
    Seam(
        "vllm.models.deepseek_v41.nvidia.vl_model",
        "DeepseekV41ForCausalLM.__init__",
        "self * vllm_config prefix",
        why="the plugin's model is a subclass",
    ),
    Seam(
        "vllm.models.deepseek_v41.nvidia.vl_model",
        "DeepseekV41ForCausalLM.get_model_state_cls",
        "self",
        why="rows are staged by a subclass of the model state",
    ),
    Seam(
        "vllm.models.deepseek_v41.nvidia.vl_model",
        "DeepseekV41ForCausalLM.load_weights",
        "self weights",
        why="tables are left out of the weights",
    ),
    Seam(
        STATE,
        "DeepseekV41ModelState.prepare_inputs",
        "self input_batch req_states",
        uses=('model_inputs["lookback_token_ids"] = window',),
        why="a step's rows are staged behind it, with the look-back it has gathered",
    ),
    Seam(
        STATE,
        "DeepseekV41ModelState.prepare_dummy_inputs",
        "self num_reqs num_tokens",
        why="a captured graph runs on zero rows",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.execute_model",
        uses=(
            "**self.model_state.prepare_inputs(input_batch, self.req_states)",
            "self.cudagraph_manager.run_fullgraph(batch_desc)",
        ),
        decorators="torch.inference_mode()",
        why="inputs are prepared in Python before each forward or replay",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.add_request",
        "self request",
        why="a prompt is prefetched when its request arrives",
    ),
    Seam(
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.get_all_weights",
        uses=('getattr(model, "is_unused_checkpoint_weight", None)',),
        decorators="",
        why="shards that hold nothing but tables are not read",
    ),
    Seam(
        "vllm.model_executor.model_loader.weight_utils",
        "filter_duplicate_safetensors_files",
        uses=("missing_files = weight_files_in_index - hf_weights_files_set", "raise FileNotFoundError("),
        why="docs/engines.md says that an index must not name shards that are missing",
    ),
    Seam(
        "vllm.config.vllm",
        "VllmConfig._resolve_and_verify_engram_config",
        "self",
        uses=("and self.parallel_config.use_ubatching", "raise ValueError("),
        why="micro-batches, whose rows would need places of their own, are refused by vLLM itself",
    ),
    Seam(
        "vllm.plugins",
        "load_general_plugins",
        "",
        uses=("for func in plugins.values(): func()",),
        why="what `register` raises stops the engine",
    ),
    Seam(
        "vllm.config.engram",
        "EngramConfig",
        decorators="config",
        uses=(
            "cpu_offload: bool",
            "embedding_across_dp: bool",
            "dp_shared_memory: bool | None",
            "use_thp: bool",
        ),
        why="unsuited configurations are refused by these",
    ),
]
