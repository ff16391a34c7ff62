"""SGLang 0.5.23 as the plugin knows it."""

from seams import Seam

ENGRAM = "sglang.srt.layers.engram"
STAGING = "sglang.srt.layers.engram_staging"
FULL = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"

SEAMS = [
    Seam(
        ENGRAM,
        "EngramEmbedding.__init__",
        "self num_embeddings dim layer_id column_bounds",
        uses=("self.staged_by_scheduler = False", "self.host_table", "self.peer", "self._sort_host_reads"),
        why="it is overridden, and makes what the methods that are inherited read",
    ),
    Seam(
        ENGRAM,
        "EngramEmbedding.forward",
        "self indices forward_batch * cp_all_tokens",
        uses=(
            "if self.peer is not None:",
            "if self._shared:",
            "if cp_all_tokens and self.tp_size > 1:",
            "if self.tp_size > 1 and get_parallel().attn_dp_size > 1:",
            "return self._lookup(indices)",
        ),
        why="it is inherited, and goes through _owned_rows: under DP attention, with tp_size 1, without other ranks",
    ),
    Seam(
        ENGRAM,
        "EngramEmbedding._lookup",
        "self indices",
        uses=("values = self._owned_rows(indices)", "values = self._reduce_owned_rows(values)"),
        why="ranks add up rows that one of them owns and the others have as zeros",
    ),
    Seam(ENGRAM, "EngramEmbedding._owned_rows", "self indices", why="it is overridden"),
    Seam(ENGRAM, "EngramEmbedding.new_rows", "self indices", why="it makes the rows that are filled"),
    Seam(
        ENGRAM,
        "EngramEmbedding.dequant_staged",
        "self rows scales copied hash_shape",
        why="it is overridden: what the stager returns per layer is its first three arguments",
    ),
    Seam(
        ENGRAM,
        "EngramEmbedding.finish_load",
        "self label",
        uses=("if self.peer is not None:", "if self.host_table is not None:"),
        why="it is inherited, and must find nothing to do",
    ),
    Seam(
        ENGRAM,
        "shard_range",
        "num_embeddings column_bounds tp_rank tp_size",
        why="it says which rows a rank owns",
    ),
    Seam(
        ENGRAM,
        "Engram.__init__",
        uses=("self.embed = EngramEmbedding(", "self.layer_hash_index = layout.layer_ids.index(layer_id)"),
        why="it makes the embedding by the name that is replaced",
    ),
    Seam(
        ENGRAM,
        "Engram.forward",
        "self x hash_ids forward_batch * input_ids cp_all_tokens",
        uses=(
            "self.embed.staged_by_scheduler and",
            "emb = self.embed_rows(hash_ids, forward_batch, cp_all_tokens)",
        ),
        why="with staged_by_scheduler off it calls embed_rows, which breaks a graph by itself or finds rows staged",
    ),
    Seam(
        ENGRAM,
        "Engram.embed_rows",
        "self hash_ids forward_batch cp_all_tokens",
        uses=("self.embed.dequant_staged(*staged[self.layer_hash_index], hash_ids.shape)",),
        why="staged rows of a batch go before a lookup",
    ),
    Seam(
        ENGRAM,
        "EngramHasher.__init__",
        uses=('register_buffer("token_map"', 'register_buffer("multipliers"', 'register_buffer("primes"'),
        why="the handshake compares them",
    ),
    Seam(ENGRAM, "EngramHasher.hash_windows", "self tokens blocked", why="the stager hashes by it"),
    Seam(
        STAGING,
        "EngramRowStager.from_model",
        "cls model hasher device",
        "classmethod",
        why="it is overridden",
    ),
    Seam(STAGING, "EngramRowStager.stage", "self batch", why="it is overridden"),
    Seam(
        STAGING,
        "EngramRowStager._windows",
        "self batch",
        uses=("self.hasher.max_ngram_size", "req.full_untruncated_fill_ids"),
        why="it is inherited",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_components.ngram_embedding_manager",
        "NgramEmbeddingManager.from_model",
        "cls * model model_config req_to_token_pool max_running_requests device",
        "classmethod",
        ("EngramRowStager.from_model(model, engram_hasher, torch.device(device))",),
        "it makes the stager, and so shakes hands, when the model has been loaded",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_components.ngram_embedding_manager",
        "NgramEmbeddingManager.prepare_for_forward",
        "self batch * chunked_req",
        uses=("batch.engram_staged_rows = self.engram_stager.stage(batch)",),
        why="it stages a batch before its forward",
    ),
    Seam(
        BREAKS,
        "eager_on_graph",
        "fn capture_stub * enable",
        uses=("output = capture_stub(*args, **kwargs)", "capture.cuda_graph._break_fns.append(replay_fn)"),
        why="rows are fetched between the segments of a breakable CUDA graph",
    ),
    Seam(
        FULL,
        "FullCudaGraphBackend.capture_one",
        "self shape_key forward_fn capture_inputs post_warmup_hook",
        uses=("for warmup_step in range(2):", "output = forward_fn()", "out = forward_fn()"),
        why="places for rows are made in the runs before a capture",
    ),
    Seam(
        FULL,
        "FullCudaGraphBackend.replay",
        "self shape_key static_forward_batch",
        uses=("self._graphs[shape_key].replay()",),
        why="rows are staged before it, when the buffers of the captured batch have been filled",
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.execute",
        "self forward_batch pp_proxy_tensors",
        uses=(
            "self.load_batch(forward_batch, pp_proxy_tensors)",
            "output = self.backend.replay(self._replay_graph_key, forward_batch)",
        ),
        why="a batch is loaded into the captured one before the replay",
    ),
    Seam(
        ENGRAM,
        "EngramHasher._torch_hash_ids",
        "self input_ids positions kmode history num_real block row starts",
        why="the ids of a step are computed by it, without moving the history",
    ),
    Seam(
        ENGRAM,
        "EngramHasher.forward",
        "self input_ids forward_batch",
        uses=(
            "block = int(forward_batch.spec_info.draft_token_num)",
            "history[req_slots] if hist_via_slots else history",
            "out_loc == 0",
        ),
        why="a graph's ids are those that were computed before it",
    ),
    Seam(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry.register",
        "cls target hook hook_type * source",
        "classmethod",
        why="classes and methods are replaced through it",
    ),
    Seam(
        "sglang.srt.models.deepseek_v4",
        "DeepseekV4ForCausalLM.load_weights",
        "self weights is_nextn",
        why="tables are left out of the weights",
    ),
    Seam(
        "sglang.srt.model_loader.loader",
        "DefaultModelLoader._prepare_weights",
        "self model_name_or_path revision fall_back_to_pt allow_patterns_overrides",
        uses=("-> Tuple[str, List[str], bool]",),
        why="shards that hold nothing but tables are left out of the second value",
    ),
    Seam("sglang.srt.environ", "EnvField.is_set", "self", why="staging is on unless told otherwise"),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler._add_request_to_queue",
        "self req is_retracted",
        why="a prompt is prefetched when its request is queued",
    ),
]
