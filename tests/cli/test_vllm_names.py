"""vLLM 0.33's engine arguments and `serve` flags, and old ones in scripts: each has a verdict."""

from __future__ import annotations

from dataclasses import fields

import pytest

from invar.cli import serve
from invar.cli.rewrite import rules_of
from invar.config import EngineConfig
from invar.peer_options import ABSENT, INERT, INERT_FIELDS

ARGUMENTS = """
model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code
allowed_local_media_path allowed_media_domains tensor_parallel_size dtype quantization revision
tokenizer_revision chat_template seed gpu_memory_utilization cpu_offload_gb offload_group_size
offload_num_in_group offload_prefetch_step offload_params enforce_eager disable_custom_all_reduce
hf_token hf_overrides mm_processor_kwargs pooler_config structured_outputs_config profiler_config
attention_config kv_cache_memory_bytes compilation_config quantization_config logits_processors
spec_method spec_model spec_tokens max_model_len max_num_seqs max_num_batched_tokens
enable_prefix_caching enable_chunked_prefill pipeline_parallel_size data_parallel_size
enable_expert_parallel distributed_executor_backend kv_cache_dtype block_size enable_lora
max_loras max_lora_rank max_cpu_loras limit_mm_per_prompt speculative_config load_format
download_dir served_model_name disable_log_stats generation_config override_generation_config
enable_sleep_mode max_logprobs scheduling_policy async_scheduling kv_transfer_config
worker_extension_cls swap_space max_seq_len_to_capture guided_decoding_backend task
use_v2_block_manager device rope_scaling num_gpu_blocks_override disable_sliding_window
preemption_mode disable_async_output_proc config_format worker_cls model_impl
"""

FLAGS = """
--model --served-model-name --tokenizer --tokenizer-mode --trust-remote-code --revision --dtype
--quantization --load-format --download-dir --hf-overrides --max-model-len
--gpu-memory-utilization --kv-cache-memory-bytes --max-num-seqs --max-num-batched-tokens
--max-num-queued-reqs --block-size --kv-cache-dtype --enable-prefix-caching
--enable-chunked-prefill --long-prefill-token-threshold --scheduling-policy --async-scheduling
--enforce-eager -O --optimization-level --compilation-config --cudagraph-capture-sizes
--attention-backend --tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size
-dp --data-parallel-rank --enable-expert-parallel --enable-eplb --decode-context-parallel-size
--nnodes --node-rank --master-addr --distributed-executor-backend --enable-lora --lora-modules
--max-loras --max-lora-rank --max-cpu-loras --limit-mm-per-prompt --mm-processor-kwargs
--mm-processor-cache-gb --allowed-local-media-path --speculative-config --spec-method --spec-model
--spec-tokens --structured-outputs-config --reasoning-parser --kv-transfer-config
--kv-offloading-size --kv-offloading-backend --kv-events-config --cpu-offload-gb
--enable-sleep-mode --seed --generation-config --override-generation-config --max-logprobs
--logits-processors --stream-interval --otlp-traces-endpoint --enable-log-requests
--disable-log-stats --enable-fault-tolerance --shutdown-timeout --config --host --port --uds
--api-key --ssl-keyfile --ssl-certfile --root-path --allowed-origins --middleware --chat-template
--chat-template-content-format --default-chat-template-kwargs --response-role
--enable-auto-tool-choice --tool-call-parser --tool-parser-plugin --tool-server
--enable-prompt-tokens-details --enable-force-include-usage --enable-request-id-headers
--return-tokens-as-token-ids --max-log-len --uvicorn-log-level --disable-uvicorn-access-log
--api-server-count --headless --sse-keep-alive-interval --fingerprint-mode
"""

FIELDS = {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize("name", ARGUMENTS.split())
def test_every_argument_is_known(name: str) -> None:
    assert sum(name in known for known in (FIELDS, INERT, ABSENT)) == 1


@pytest.mark.parametrize("flag", FLAGS.split())
def test_every_flag_is_known(flag: str) -> None:
    assert (flag in rules_of("serve")) != (flag in serve.parser().own)


def test_no_name_has_two_verdicts_and_every_verdict_a_reason() -> None:
    assert not INERT.keys() & ABSENT.keys()
    assert not FIELDS & (INERT.keys() | ABSENT.keys())
    assert INERT_FIELDS.keys() <= FIELDS
    for off, reason in (*INERT.values(), *ABSENT.values(), *INERT_FIELDS.values()):
        assert off
        assert reason
