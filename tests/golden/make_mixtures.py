"""The tiny mixtures of experts; as `make.py`, whose functions it uses:

PYTHONPATH=.:tests python tests/golden/make_mixtures.py [NAME…]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from golden.double_transformers import double_precision
from golden.make import SHARED, write_model
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

EXPERTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
SMALL: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4}

GPT_OSS: dict[str, Any] = EXPERTS | {
    "intermediate_size": 32,
    "num_local_experts": 4,
    "sliding_window": 9,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
LATENT: dict[str, Any] = EXPERTS | {
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rms_norm_eps": float(np.float32(1e-6)),
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK2: dict[str, Any] = LATENT | {
    "head_dim": 16,
    "q_lora_rank": None,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5,
}
DEEPSEEK3: dict[str, Any] = LATENT | {
    "q_lora_rank": 16,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "mscale": 1.25,
        "mscale_all_dim": 1.25,  # a tenth of it is a float32
        "original_max_position_embeddings": 32,
    },
}
LLAMA4: dict[str, Any] = EXPERTS | {
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "attn_scale": 0.125,
    "pad_token_id": None,
}


def models() -> dict[str, tuple[Any, str]]:
    """Name → model and architecture. The seed is the place in this order: append only."""
    mixtral = EXPERTS | {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": 9}
    qwen2 = EXPERTS | SMALL | {"shared_expert_intermediate_size": 64}
    qwen3 = EXPERTS | SMALL | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}
    v2 = SHARED | DEEPSEEK2
    v3 = {key: value for key, value in (SHARED | DEEPSEEK3).items() if key != "head_dim"}
    return {
        "mixtral": (MixtralForCausalLM(MixtralConfig(**SHARED | mixtral)), "llama"),
        "qwen2_moe": (Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHARED | qwen2)), "qwen2moe"),
        "qwen3_moe": (Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHARED | qwen3)), "qwen3moe"),
        "gpt_oss": (GptOssForCausalLM(GptOssConfig(**SHARED | GPT_OSS)), "gpt-oss"),
        "llama4": (Llama4ForCausalLM(Llama4TextConfig(**SHARED | LLAMA4)), "llama4"),
        "deepseek_v2": (DeepseekV2ForCausalLM(DeepseekV2Config(**v2)), "deepseek2"),
        "deepseek_v3": (DeepseekV3ForCausalLM(DeepseekV3Config(**v3)), "deepseek2"),
    }


def round_epsilons(model: Any) -> None:
    """The norms of DeepSeek's latents have one of their own: to what GGUF can hold."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = float(np.float32(module.variance_epsilon))


def main() -> None:
    wanted = sys.argv[1:]
    with double_precision():
        for seed, (name, (model, architecture)) in enumerate(models().items()):
            if not wanted or name in wanted:
                round_epsilons(model)
                write_model(name, model, architecture, 100_000 + 1000 * seed)


if __name__ == "__main__":
    main()
