"""Names of vLLM's engine options that Invar has no field for, each with the reason.

vLLM's `serve` flags are the same names with hyphens: `invar.cli.compat` makes them from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a peer's option asks for: the values that ask for nothing, and why there is nothing to do, or
# what is missing. Where one of the values is False, the option is a switch.
Reasons = Mapping[str, tuple[tuple[Any, ...], str]]

# Fields of `EngineConfig` that are checked and change nothing here.
INERT_FIELDS: Reasons = {
    "dtype": (("auto",), "number formats are those of the model file"),
    "enable_chunked_prefill": (
        (None, True),
        "long prompts always go in chunks; answers do not depend on it",
    ),
}

LOAD_FORMATS = ("auto", "safetensors", "gguf")
PICKLE = "is of pickles, which could run any code and are never opened"
OTHER_LOADER = "is another way to read safetensors, which are mapped here"
# Names of vLLM and SGLang that are refused, each with the reason.
NO_LOAD_FORMATS: Mapping[str, str] = {
    "pt": PICKLE,
    "npcache": PICKLE,
    "dummy": "makes weights up; python bench/synthetic.py writes a model of random weights",
    "bitsandbytes": "is not read; --quantization makes int8, fp8 and others of plain weights",
    "mistral": "is not read; the same weights come as safetensors with config.json",
    "tensorizer": "is not read",
    "sharded_state": "is of several devices",
    "layered": OTHER_LOADER,
    "remote": "is of another process's memory",
    "runai_streamer": OTHER_LOADER,
    "fastsafetensors": OTHER_LOADER,
}

WHOLE_TEXT = "LLM gives whole texts; invar serve tells thoughts from answers"
ADAPTERS = "adapters are not built yet"
EXPERTS = "there are no experts to place"
GRAMMAR = "there is one grammar engine"
GRAPHS = "there are no graphs to capture"
IN_MEMORY = "everything is in the machine's memory already"
KV_STORE = "what leaves the KV cache is kept on disk where kv_store and kv_store_size say so"
LOADING = "a GGUF file is mapped and packed, in one way"
METRICS = "statistics are at /metrics and never in the log"
NO_GPU_BATCHES = "there are no batches to overlap on a GPU"
ONE_PROCESS = "one process runs the model"
ONE_REPLICA = "there is one replica"
SPECULATION = "no speculation yet; the answers are the same without it"
STEPS = "every step is scheduled anew; the answers do not depend on it"
TEXT_ONLY = "the model reads text only"
TOKENIZER = "one tokenizer runs in this process"

# Names of vLLM, old ones too, since scripts outlive versions. Nothing here can change an answer.
INERT: Reasons = {
    "additional_config": ((None, {}), "it is for platforms that are not built"),
    "aggregate_engine_logging": ((None, False), METRICS),
    "all2all_backend": ((None,), EXPERTS),
    "allowed_local_media_path": ((None, ""), TEXT_ONLY),
    "allowed_media_domains": ((None, []), TEXT_ONLY),
    "async_scheduling": ((None, False), "a step has nothing to overlap with on a CPU"),
    "attention_backend": ((None,), "there is one attention kernel per instruction set"),
    "attention_config": ((None,), "there is one attention kernel per instruction set"),
    "block_size": ((None, 32), "the backend's pages hold 32 tokens"),
    "calculate_kv_scales": ((None, False), "int8 KV takes its scales from each token"),
    "code_revision": ((None,), "no code of a model is run"),
    "collect_detailed_traces": ((None,), METRICS),
    "compilation_config": ((None, 0), "there is nothing to compile"),
    "cpu_offload_gb": ((None, 0), IN_MEMORY),
    "cpu_offload_params": ((None, []), IN_MEMORY),
    "cuda_graph_sizes": ((None, []), GRAPHS),
    "cudagraph_capture_sizes": ((None, []), GRAPHS),
    "cudagraph_metrics": ((None, False), GRAPHS),
    "data_parallel_address": ((None,), ONE_REPLICA),
    "data_parallel_backend": ((None, "mp"), ONE_REPLICA),
    "data_parallel_external_lb": ((None, False), ONE_REPLICA),
    "data_parallel_hybrid_lb": ((None, False), ONE_REPLICA),
    "data_parallel_rpc_port": ((None,), ONE_REPLICA),
    "data_parallel_size_local": ((None, 1), ONE_REPLICA),
    "data_parallel_start_rank": ((None, 0), ONE_REPLICA),
    "dbo_decode_token_threshold": ((None,), NO_GPU_BATCHES),
    "dbo_prefill_token_threshold": ((None,), NO_GPU_BATCHES),
    "dcp_kv_cache_interleave_size": ((None, 1), ONE_REPLICA),
    "default_mm_loras": ((None, {}), ADAPTERS),
    "disable_async_output_proc": ((None, False), "tokens are sent as they come"),
    "disable_cascade_attn": ((None, False), "there is no cascade attention"),
    "disable_chunked_mm_input": ((None, False), TEXT_ONLY),
    "disable_custom_all_reduce": ((None, False), "one device needs no all-reduce"),
    "disable_hybrid_kv_cache_manager": ((None, False), "there is one manager of KV memory"),
    "disable_log_requests": ((None, True, False), "prompts stay out of logs"),
    "disable_log_stats": ((None, False), METRICS),
    "disable_mm_preprocessor_cache": ((None, False), TEXT_ONLY),
    "disable_nccl_for_dp_synchronization": ((None, False), ONE_REPLICA),
    "distributed_executor_backend": ((None,), "one device needs no executor"),
    "distributed_timeout_seconds": ((None,), ONE_PROCESS),
    "download_dir": ((None,), "models are kept in ~/.cache/invar; INVAR_CACHE names another place"),
    "enable_dbo": ((None, False), NO_GPU_BATCHES),
    "enable_elastic_ep": ((None, False), EXPERTS),
    "enable_eplb": ((None, False), EXPERTS),
    "enable_fault_tolerance": ((None, False), ONE_PROCESS),
    "enable_layerwise_nvtx_tracing": ((None, False), METRICS),
    "enable_log_requests": ((None, False), "prompts stay out of logs"),
    "enable_logging_iteration_details": ((None, False), METRICS),
    "enable_lora_bias": ((None, False), ADAPTERS),
    "enable_mfu_metrics": ((None, False), METRICS),
    "enable_mm_embeds": ((None, False), TEXT_ONLY),
    "enable_multimodal_encoder_data_parallel": ((None, False), TEXT_ONLY),
    "enable_sleep_mode": ((None, False), "there is no device memory to give back"),
    "engine_use_ray": ((None, False), ONE_PROCESS),
    "eplb_config": ((None, {}), EXPERTS),
    "expert_placement_strategy": ((None, "linear"), EXPERTS),
    "fail_on_environ_validation": ((None, False), "Invar's environment variables are in README.md"),
    "fully_sharded_loras": ((None, False), ADAPTERS),
    "guided_decoding_backend": ((None, "auto"), GRAMMAR),
    "guided_decoding_disable_fallback": ((None, False), GRAMMAR),
    "hf_token": ((None,), "set HF_TOKEN in the environment instead"),
    "ignore_patterns": ((None, []), LOADING),
    "interleave_mm_strings": ((None, False), TEXT_ONLY),
    "kernel_config": ((None, {}), "there is one kernel per instruction set"),
    "kv_cache_metrics": ((None, False), METRICS),
    "kv_cache_metrics_sample": ((None,), METRICS),
    "kv_offloading_backend": ((None, "native"), KV_STORE),
    "kv_offloading_size": ((None, 0), KV_STORE),
    "kv_sharing_fast_prefill": ((None, False), "no layer shares the KV of another"),
    "language_model_only": ((None, True, False), TEXT_ONLY),
    "limit_mm_per_prompt": ((None, {}), TEXT_ONLY),
    "long_lora_scaling_factors": ((None, []), ADAPTERS),
    "long_prefill_token_threshold": ((None, 0), "chunks of prompts share the budget of a step"),
    "lora_dtype": ((None, "auto"), ADAPTERS),
    "lora_extra_vocab_size": ((None, 0), ADAPTERS),
    "lora_target_modules": ((None, []), ADAPTERS),
    "mamba_block_size": ((None,), "no model with Mamba layers is built"),
    "mamba_cache_dtype": ((None, "auto"), "no model with Mamba layers is built"),
    "mamba_cache_mode": ((None, "none"), "no model with Mamba layers is built"),
    "mamba_ssm_cache_dtype": ((None, "auto"), "no model with Mamba layers is built"),
    "master_addr": ((None, "127.0.0.1"), ONE_PROCESS),
    "master_port": ((None,), ONE_PROCESS),
    "max_context_len_to_capture": ((None,), GRAPHS),
    "max_cpu_loras": ((None,), ADAPTERS),
    "max_cudagraph_capture_size": ((None,), GRAPHS),
    "max_log_len": ((None,), "prompts stay out of logs"),
    "max_long_partial_prefills": ((None, 1), "chunks of prompts share the budget of a step"),
    "max_lora_rank": ((None,), ADAPTERS),
    "max_loras": ((None,), ADAPTERS),
    "max_num_partial_prefills": ((None, 1), "chunks of prompts share the budget of a step"),
    "max_parallel_loading_workers": ((None,), LOADING),
    "max_prompt_adapter_token": ((None,), ADAPTERS),
    "max_prompt_adapters": ((None,), ADAPTERS),
    "max_seq_len_to_capture": ((None,), GRAPHS),
    "media_io_kwargs": ((None, {}), TEXT_ONLY),
    "mm_encoder_attn_backend": ((None,), TEXT_ONLY),
    "mm_encoder_only": ((None, False), TEXT_ONLY),
    "mm_encoder_tp_mode": ((None,), TEXT_ONLY),
    "mm_processor_cache_gb": ((None, 0), TEXT_ONLY),
    "mm_processor_cache_type": ((None,), TEXT_ONLY),
    "mm_processor_kwargs": ((None, {}), TEXT_ONLY),
    "mm_shm_cache_max_object_size_mb": ((None,), TEXT_ONLY),
    "model_impl": ((None, "auto"), "each architecture is built once"),
    "model_loader_extra_config": ((None, {}), LOADING),
    "moe_backend": ((None, "auto"), EXPERTS),
    "multi_step_stream_outputs": ((None, True, False), "tokens are sent as they come"),
    "ngram_prompt_lookup_max": ((None,), SPECULATION),
    "ngram_prompt_lookup_min": ((None,), SPECULATION),
    "num_gpu_blocks_override": ((None,), "KV memory is set in bytes: kv_cache_memory_bytes"),
    "num_lookahead_slots": ((None, 0), SPECULATION),
    "num_redundant_experts": ((None, 0), EXPERTS),
    "num_scheduler_steps": ((None, 1), STEPS),
    "num_speculative_tokens": ((None,), SPECULATION),
    "offload_backend": ((None, "auto"), IN_MEMORY),
    "offload_group_size": ((None, 0), IN_MEMORY),
    "offload_num_in_group": ((None, 0, 1), IN_MEMORY),
    "offload_params": ((None, []), IN_MEMORY),
    "offload_prefetch_step": ((None, 0, 1), IN_MEMORY),
    "optimization_level": ((None,), "there is nothing to compile"),
    "performance_mode": ((None, "balanced"), STEPS),
    "preemption_mode": ((None, "recompute"), "what the cache and the KV store lost is recomputed"),
    "prefix_caching_hash_algo": ((None,), "prefixes are compared by their tokens, not by hashes"),
    "profiler_config": ((None, {}), "profilers of the system see the process as it is"),
    "pt_load_map_location": ((None, "cpu"), LOADING),
    "ray_workers_use_nsight": ((None, False), ONE_PROCESS),
    "renderer_num_workers": ((None, 1), TOKENIZER),
    "safetensors_load_strategy": ((None,), LOADING),
    "scheduler_delay_factor": ((None, 0), STEPS),
    "scheduler_reserve_full_isl": ((None, True, False), STEPS),
    "scheduling_delay_factor": ((None, 0), STEPS),
    "show_hidden_metrics_for_version": ((None,), METRICS),
    "skip_mm_profiling": ((None, True, False), TEXT_ONLY),
    "spec_method": ((None,), SPECULATION),
    "spec_model": ((None,), SPECULATION),
    "spec_tokens": ((None, 0), SPECULATION),
    "speculative_config": ((None,), SPECULATION),
    "speculative_draft_tensor_parallel_size": ((None,), SPECULATION),
    "speculative_model": ((None,), SPECULATION),
    "stream_interval": ((None, 1), "tokens are sent as they come"),
    "tokenizer_pool_extra_config": ((None, {}), TOKENIZER),
    "tokenizer_pool_size": ((None, 0), TOKENIZER),
    "tokenizer_pool_type": ((None,), TOKENIZER),
    "trust_remote_code": ((None, False), "no code of a model is run"),
    "ubatch_size": ((None, 0), NO_GPU_BATCHES),
    "use_tqdm_on_load": ((None, True, False), "a load shows no bar"),
    "use_v2_block_manager": ((None, False), "there is one manager of KV memory"),
    "video_pruning_rate": ((None, 0), TEXT_ONLY),
    "worker_use_ray": ((None, False), ONE_PROCESS),
}

# What would change answers or placement, or is a feature of its own, and is not built.
ABSENT: Reasons = {
    "config_format": (
        (None, "auto", "hf"),
        "models are read from config.json, or from the metadata of GGUF",
    ),
    "convert": ((None, "auto", "none"), "this model generates"),
    "data_parallel_rank": ((None, 0), "more than one replica needs more than one device"),
    "data_parallel_size": ((None, 1), "more than one replica needs more than one device"),
    "decode_context_parallel_size": ((None, 1), "it needs more than one device"),
    "device": (
        (None, "auto", "cpu"),
        "the devices here are: cpu; docs/backends.md says what another one must do",
    ),
    "disable_sliding_window": ((None, False), "the windows of a model are part of its answers"),
    "ec_transfer_config": ((None,), "KV transfer is not built yet"),
    "enable_expert_parallel": ((None, False), "it needs more than one device"),
    "enable_lora": ((None, False), ADAPTERS),
    "enable_prompt_adapter": ((None, False), ADAPTERS),
    "enable_prompt_embeds": ((None, False), "a prompt is a text or token ids"),
    "enable_reasoning": (
        (None, False),
        WHOLE_TEXT,
    ),
    "hf_config_path": ((None,), "the model is described by its file"),
    "hf_overrides": ((None, {}), "the model is described by its file"),
    "io_processor_plugin": ((None,), "plug-ins over prompts and answers are not supported"),
    "kv_events_config": ((None,), "KV transfer is not built yet"),
    "kv_transfer_config": ((None,), "KV transfer is not built yet"),
    "logits_processor_pattern": ((None,), "Python code over logits is not supported"),
    "logits_processors": ((None, []), "Python code over logits is not supported"),
    "logprobs_mode": (
        (None, "raw_logprobs"),
        "log-probabilities are the model's own, before temperature and filters",
    ),
    "nnodes": ((None, 1), "it needs more than one machine"),
    "node_rank": ((None, 0), "it needs more than one machine"),
    "override_attention_dtype": ((None,), "the number formats are those of the file"),
    "override_neuron_config": ((None, {}), "the devices here are: cpu"),
    "override_pooler_config": ((None,), "pooling models are not built yet"),
    "pipeline_parallel_size": ((None, 1), "it needs more than one device"),
    "pooler_config": ((None,), "pooling models are not built yet"),
    "prefill_context_parallel_size": ((None, 1), "it needs more than one device"),
    "qlora_adapter_name_or_path": ((None,), ADAPTERS),
    "quantization_config": ((None,), "the number formats are those of the file"),
    "quantization_param_path": ((None,), "the number formats are those of the file"),
    "reasoning_parser": (
        (None, ""),
        WHOLE_TEXT,
    ),
    "reasoning_parser_plugin": (
        (None, ""),
        WHOLE_TEXT,
    ),
    "rope_parameters": ((None, {}), "rope is what the model file states"),
    "rope_scaling": ((None, {}), "rope is what the model file states"),
    "rope_theta": ((None,), "rope is what the model file states"),
    "runner": ((None, "auto", "generate"), "this model generates"),
    "scheduler_cls": ((None,), "the scheduler is Invar's own; scheduling_policy sets its order"),
    "skip_tokenizer_init": ((None, False), "SamplingParams(detokenize=False) leaves out the text"),
    "task": ((None, "auto", "generate"), "this model generates"),
    "tokenizer_mode": ((None, "auto"), "the tokenizer is told by the file"),
    "weight_transfer_config": ((None,), "weights are those of the file"),
    "worker_cls": ((None, "auto"), "there are no worker processes"),
    "worker_extension_cls": ((None, ""), "there are no worker processes"),
}
