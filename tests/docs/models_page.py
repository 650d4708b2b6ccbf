"""docs/models.md, made of the registry and of the lists that the tests go through.

PYTHONPATH=.:tests python tests/docs/models_page.py
"""

from __future__ import annotations

from pathlib import Path

from golden.families import FAMILIES, family_directory
from golden.tiny_models import TINY_MODELS, model_path

from invar import _native
from invar.backends.cpu.formats import WEIGHT_FORMATS
from invar.models.registry import ARCHITECTURES, MODEL_TYPES, family_of, open_directory
from invar.weights.formats import DECODERS, QuantType
from invar.weights.gguf import GGUFFile

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """\
# Models and formats

Made by `tests/docs/models_page.py` from the lists that the tests go through; do not edit. How to
add a family: [adding_a_model.md](adding_a_model.md).

## Families

Every tiny model named here has logits of `transformers` in double precision, which the numpy
reference meets from GGUF and, where a `model_type` stands here, from safetensors (Llama 3's factors
are float32 in GGUF); the CPU backend is held to the contract, and chunks, decode, batches and
threads change no bit.

| architecture (GGUF) | `model_type` (Hugging Face) | tiny models of the tests |
|---|---|---|
"""
FORMATS = """
## Formats of weights

A format is a property of each tensor, whatever the family; one without a kernel is refused by name.
A kernel reads the packed form: memory has to deliver so many bits a weight for every token that is
decoded. The codebooks of IQ1, IQ2 and IQ3 are looked up when a model is loaded: what is kept of a
weight is its place among the values that occur, in three or four bits. GGUF's NVFP4 and its
`.scale` tensors become NVFP4_ROWS.

| format | CPU kernel | bits a weight in the file | packed | numpy reference |
|---|---|---|---|---|
"""
COLUMNS = 4096  # of the row that bits are counted of


def stored_bits(kind: QuantType) -> float:
    return kind.row_bytes(COLUMNS) * 8 / COLUMNS


def packed_bits(name: str) -> float:
    return _native.panel_bytes(name, COLUMNS) * 8 / (_native.PANEL_COLUMNS * COLUMNS)


def tiny_models() -> dict[str, list[str]]:
    """architecture → names"""
    found: dict[str, list[str]] = {name: [] for name in ARCHITECTURES}
    for name in TINY_MODELS:
        with GGUFFile(model_path(name)) as file:
            found[file.metadata["general.architecture"]].append(name)
    for name in FAMILIES:
        with open_directory(family_directory(name)) as source:
            found[source.family.architecture].append(name)
    return found


def page() -> str:
    families = {name: family_of({"model_type": name}) for name in MODEL_TYPES}
    lines = []
    for architecture, names in tiny_models().items():
        types = [t for t, family in families.items() if family.architecture == architecture]
        lines.append(f"| {architecture} | {', '.join(types) or '—'} | {', '.join(names)} |\n")
    formats = [
        f"| {kind.name} | {name} | {stored_bits(kind):.2f} | {packed_bits(name):.2f} "
        f"| {'yes' if kind in DECODERS else 'by its layout'} |\n"
        for kind, name in WEIGHT_FORMATS.items()
    ]
    return HEAD + "".join(lines) + FORMATS + "".join(formats)


if __name__ == "__main__":
    PAGE.write_text(page())
