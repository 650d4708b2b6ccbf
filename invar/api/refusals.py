"""Fields that are known but cannot be honoured yet: always a 400, never a silent difference.

One row a field: the values at which it asks for nothing, and what the client is told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from invar.api.errors import ApiError, bad_request

SAMPLER = "this sampler is not built; temperature, top_k, top_p, min_p and the penalties are"
OTHER_MODEL = "this server serves a text model"
TRANSFER = "KV transfer between servers comes with a later version of this server"


@dataclass(frozen=True)
class Refusal:
    reason: str
    neutral: tuple[object, ...] = ()  # None is always neutral


REFUSALS: Mapping[str, Refusal] = {
    "functions": Refusal("it is gone from the API; send tools", ([],)),
    "function_call": Refusal("it is gone from the API; send tool_choice", ("none", "auto")),
    "modalities": Refusal(OTHER_MODEL, (["text"],)),
    "audio": Refusal(OTHER_MODEL),
    "mm_processor_kwargs": Refusal(OTHER_MODEL, ({},)),
    "web_search_options": Refusal("this server searches nothing"),
    "prediction": Refusal("predicted outputs come with a later version of this server"),
    "suffix": Refusal("filling in the middle comes with a later version of this server", ("",)),
    "best_of": Refusal("best_of is gone from the API; ask for n choices", (1,)),
    "use_beam_search": Refusal("beam search comes with a later version of this server", (False,)),
    "length_penalty": Refusal("length_penalty belongs to beam search", (1, 1.0)),
    "documents": Refusal("retrieval templates come with a later version of this server", ([],)),
    "chat_template": Refusal("the server's operator chooses the template (--chat-template)"),
    "truncate_prompt_tokens": Refusal("it comes with a later version; shorten the prompt"),
    "return_token_ids": Refusal("it comes with a later version of this server", (False,)),
    "return_tokens_as_token_ids": Refusal("it comes with a later version", (False,)),
    "return_hidden_states": Refusal("it comes with a later version of this server", (False,)),
    "logprob_token_ids": Refusal("it comes with a later version of this server", ([],)),
    "repetition_detection": Refusal("it comes with a later version of this server"),
    "logits_processors": Refusal("code in a request is not run", ([],)),
    "custom_logit_processor": Refusal("code in a request is not run", ("",)),
    "stop_regex": Refusal("it comes with a later version; use stop", ("", [])),
    "kv_transfer_params": Refusal(TRANSFER, ({},)),
    "ec_transfer_params": Refusal(TRANSFER, ({},)),
    "bootstrap_room": Refusal(TRANSFER),
    "prompt_embeds": Refusal("prompts are text or token ids here"),
    "lora": Refusal("adapters come with a later version of this server", ([],)),
    "lora_path": Refusal("adapters come with a later version of this server"),
    "mirostat": Refusal(SAMPLER, (0,)),
    "typical_p": Refusal(SAMPLER, (1, 1.0)),
    "xtc_probability": Refusal(SAMPLER, (0, 0.0)),
    "dry_multiplier": Refusal(SAMPLER, (0, 0.0)),
    "dynatemp_range": Refusal(SAMPLER, (0, 0.0)),
    "watermarking": Refusal("it comes with a later version of this server"),
    "store": Refusal("answers are not kept", (False,)),
    "verbosity": Refusal("this model knows no verbosity", ("medium",)),
    "stream_interval": Refusal("tokens are sent as they come", (1,)),
    "truncation_side": Refusal("prompts are not truncated", ("left",)),
    "add_bos": Refusal("add_special_tokens of /v1/completions says whether a text begins with it"),
    "chat_template_content_format": Refusal("the form is what the template reads", ("auto",)),
}

# Part of a protocol, and whatever their value the answer is the same: accepted, counted, and said
# once in the log.
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "session_id",
        "stream_reasoning",
        "guided_decoding_backend",
        "cache_prompt",
    }
)


@dataclass(frozen=True)
class FieldRules:
    """What a dialect says to those of its fields that are no parameters of a call."""

    refusals: Mapping[str, Refusal]
    without_effect: frozenset[str]
    known: frozenset[str]  # fields with a rule of their own
    check: Callable[[Mapping[str, Any]], None]  # that rule


def refuse_unbuilt(fields: Mapping[str, Any], rules: FieldRules) -> None:
    """Raises a 400 for the first field that asks for something this server cannot do."""
    for name, value in fields.items():
        refusal = rules.refusals.get(name)
        if refusal is not None and value is not None and value not in refusal.neutral:
            raise cannot(name, refusal.reason)
    rules.check(fields)
    options = fields.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_obfuscation"):
        raise cannot("stream_options.include_obfuscation", "events are not padded")


def cannot(name: str, reason: str) -> ApiError:
    return bad_request(f"{name} cannot be honoured: {reason}.", name, "unsupported_parameter")


OPENAI = FieldRules(REFUSALS, WITHOUT_EFFECT, frozenset(), lambda fields: None)
