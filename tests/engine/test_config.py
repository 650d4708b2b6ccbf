"""Options of the engine: which names are taken, noticed or refused."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from invar.config import ABSENT, INERT, EngineConfig


def test_article_19_options_are_understood(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig.from_args(
        model="m",
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        enable_chunked_prefill=True,
    )
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (8192, 256)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_num_seq", "max_num_seqs"), ("max_model_length", "max_model_len"), ("sed", "seed")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"{name!r}; did you mean {nearest!r}"):
        EngineConfig.from_args(**{name: 1})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("swap_space", 32),
        ("enable_chunked_prefill", False),
        ("prefix_caching_hash_algo", "sha256"),
        ("dtype", "float16"),
        ("block_size", 16),
        ("cpu_offload_gb", 4),
        ("trust_remote_code", True),
        ("disable_log_stats", True),
        ("use_v2_block_manager", True),
    ],
)
def test_what_has_nothing_to_do_here_gets_one_notice(
    option: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "invar"):
        EngineConfig.from_args(**{option: value})
    (record,) = caplog.records
    assert option in record.getMessage()
    assert not record.getMessage().rstrip().endswith(":")  # a reason follows


def test_values_that_ask_for_nothing_get_no_notice(caplog: pytest.LogCaptureFixture) -> None:
    EngineConfig.from_args(**{name: off[0] for name, (off, _) in INERT.items()})
    EngineConfig.from_args(**{name: off[0] for name, (off, _) in ABSENT.items()})
    EngineConfig.from_args(swap_space=0, dtype="auto", trust_remote_code=False)
    assert not caplog.records


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_would_change_answers_and_is_not_built_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig.from_args(**{name: 7})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "cuda"),
        ("config_format", "mistral"),
        ("tokenizer_mode", "slow"),
        ("task", "embed"),
    ],
)
def test_values_that_would_change_answers_or_placement_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value!r} is not supported: "):
        EngineConfig.from_args(**{name: value})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("pt", "is of pickles, which could run any code and are never opened"),
        ("npcache", "is of pickles"),
        ("dummy", r"makes weights up; python bench/synthetic.py"),
        ("fastsafetensors", "is another way to read safetensors"),
        ("safetensor", "is not known, nearest: safetensors"),
        (7, "is not known"),
    ],
)
def test_formats_that_are_not_read_are_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^load_format: .* {reason}.*safetensors, gguf\)$"):
        EngineConfig.from_args(load_format=value)


def test_revisions_are_of_what_is_named() -> None:
    with pytest.raises(ValueError, match="tokenizer_revision: it is of another tokenizer"):
        EngineConfig(tokenizer_revision="v1")
    EngineConfig(tokenizer_revision="main", revision="main")
    with pytest.raises(ValueError, match="revision: expected a text"):
        EngineConfig(revision=7)  # type: ignore[arg-type]


def test_a_step_has_a_token_for_every_sequence() -> None:
    with pytest.raises(ValueError, match=r"^max_num_batched_tokens: 8 .* max_num_seqs \(16\)"):
        EngineConfig.from_args(max_num_batched_tokens=8, max_num_seqs=16)
    assert EngineConfig.from_args(max_num_batched_tokens=16).max_num_seqs == 16


def test_more_devices_than_there_are_is_refused_with_the_count() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size: 2 devices asked for, found 1"):
        EngineConfig.from_args(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0),
        ("max_model_len", "4096"),
        ("max_num_seqs", True),
        ("max_num_seqs", None),
        ("max_num_batched_tokens", 10**9),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", math.nan),
        ("gpu_memory_utilization", True),
        ("num_threads", 0),
        ("seed", 1.5),
        ("model", ""),
        ("scheduling_policy", "lifo"),
        ("scheduling_policy", ["fcfs"]),
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", "INT8"),
        ("kv_cache_dtype", 8),
        ("dtype", "int8"),
        ("dtype", None),
        ("swap_space", -1),
        ("swap_space", "4"),
        ("swap_space", math.inf),
        ("enable_prefix_caching", "yes"),
        ("enable_prefix_caching", 1),
        ("enable_chunked_prefill", 0),
        ("enforce_eager", None),
        ("chat_template", 5),
        ("chat_template", ""),
        ("tokenizer", b"x"),
        ("quantization", 4),
        ("served_model_name", 7),
        ("served_model_name", ()),
        ("served_model_name", ["a", ""]),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        EngineConfig.from_args(**{name: value})


@pytest.mark.parametrize(
    ("kv_format", "names"),
    [
        ("bf16", ["auto", "bfloat16", "bf16"]),
        ("fp16", ["float16", "fp16"]),
        ("int8", ["int8", "int8_per_token_head"]),
    ],
)
def test_kv_formats_have_the_peers_names(
    kv_format: str, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        assert EngineConfig.from_args(kv_cache_dtype=name).kv_format == kv_format
    assert not caplog.records


def test_errors_of_choices_name_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"^dtype: 'int8' is not one of auto, bfloat16"):
        EngineConfig(dtype="int8")
    with pytest.raises(ValueError, match=r"^enable_prefix_caching: 'yes' is not one of None, True"):
        EngineConfig.from_args(enable_prefix_caching="yes")


def test_names_of_the_served_model() -> None:
    assert EngineConfig(model="m").names == ("m",)
    assert EngineConfig(model="m", served_model_name="a").names == ("a",)
    assert EngineConfig(model="m", served_model_name=("a", "b")).names == ("a", "b")
    assert EngineConfig(max_model_len=-1).max_model_len is None
