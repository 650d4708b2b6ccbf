"""What is refused before a model takes memory."""

from __future__ import annotations

import pytest

from invar.config import EngineConfig
from invar.engine.loader import load_engine


@pytest.mark.parametrize(("model", "tokenizer"), [
    ("smollm2", "gemma3-270m"), ("gemma3-270m", "smollm2"),
])  # fmt: skip
def test_the_tokenizer_of_another_model_is_refused_with_both_counts(
    model: str, tokenizer: str
) -> None:
    with pytest.raises(ValueError, match=f"tokenizer: {tokenizer} has ") as error:
        load_engine(EngineConfig(model=model, tokenizer=tokenizer))
    assert "262144" in str(error.value)
    assert "49152" in str(error.value)
