"""Models that see too: what of their directory is the language model, which is all that runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

SEEING = ("gemma3", "llama4", "mistral3")
"""Model types that wrap a language model, with the family that this is of if it does not say."""

TEXT_CONFIG = "text_config"  # what their language model is
OTHER_SIDES = re.compile(r"^(?:model\.)?(?:vision_\w+|multi_modal_projector)\.")


def sees(config: Config) -> bool:
    return config.get("model_type") in SEEING and isinstance(config.get(TEXT_CONFIG), Mapping)


def text_side(config: Config) -> Config:
    """The configuration of the language model, with what stands outside of it."""
    return {**config, **config[TEXT_CONFIG]} if sees(config) else config


def name_without_sight(name: str) -> str | None:
    """What the language model by itself calls a weight; None: it is of what sees."""
    if OTHER_SIDES.match(name):
        return None
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")
