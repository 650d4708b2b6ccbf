"""The tiny mixtures of experts; as `make.py`, whose functions it uses:

PYTHONPATH=.:tests python tests/golden/make_mixtures.py [NAME…]
"""

from __future__ import annotations

import sys
from typing import Any

from golden.double_transformers import double_precision
from golden.make import SHARED, write_model
from transformers import (
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
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
    return {
        "mixtral": (MixtralForCausalLM(MixtralConfig(**SHARED | mixtral)), "llama"),
        "qwen2_moe": (Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHARED | qwen2)), "qwen2moe"),
        "qwen3_moe": (Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHARED | qwen3)), "qwen3moe"),
        "gpt_oss": (GptOssForCausalLM(GptOssConfig(**SHARED | GPT_OSS)), "gpt-oss"),
        "llama4": (Llama4ForCausalLM(Llama4TextConfig(**SHARED | LLAMA4)), "llama4"),
    }


def main() -> None:
    wanted = sys.argv[1:]
    with double_precision():
        for seed, (name, (model, architecture)) in enumerate(models().items()):
            if not wanted or name in wanted:
                write_model(name, model, architecture, 100_000 + 1000 * seed)


if __name__ == "__main__":
    main()
