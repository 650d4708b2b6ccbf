"""NVFP4 matrices of GGUF with a scale of their own beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from invar.models.registry import open_gguf
from invar.weights.formats import QuantType, dequantize, quantize
from invar.weights.gguf import GGUFError
from invar.weights.gguf_writer import GGUFWriter

NAME, STACK = "blk.0.attn_q", "blk.0.ffn_up_exps"


def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)


def written(path: Path, scales: dict[str, np.ndarray]) -> Path:
    writer = GGUFWriter(path, {"general.architecture": "llama"})
    writer.add_tensor(f"{NAME}.weight", (6, 128), QuantType.NVFP4, weights())
    writer.add_tensor(f"{STACK}.weight", (2, 3, 128), QuantType.NVFP4, weights())
    for name, values in scales.items():
        writer.add_tensor(name, values.shape, QuantType.F32, values.reshape(1, -1))
    writer.write()
    return path


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_scales_multiply_their_matrices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scales = {
        f"{NAME}.scale": floats(0.3),
        f"{NAME}.input_scale": floats(7),
        f"{STACK}.scale": floats(3, 5),
    }
    plain = dequantize(quantize(weights(), QuantType.NVFP4), QuantType.NVFP4, (6, 128))
    with open_gguf(written(tmp_path / "model.gguf", scales)) as source:
        assert sorted(source.tensors) == [f"{NAME}.weight", f"{STACK}.weight"]
        info = source.tensors[f"{NAME}.weight"]
        assert (info.type, info.shape) == (QuantType.NVFP4_ROWS, (6, 128))
        assert source.raw(info.name).shape == (6, QuantType.NVFP4_ROWS.row_bytes(128))
        assert source.raw(info.name).nbytes == info.nbytes
        found = source.dequantize(info.name)
        np.testing.assert_array_equal(found, plain * np.float32(0.3))
        stack = source.dequantize(f"{STACK}.weight")
        expected = plain.reshape(2, 3, 128) * floats(3, 5)[:, None, None]
        np.testing.assert_array_equal(stack, expected)
        assert sum(part.nbytes for part in source.made_from(info.name) or ()) == 6 * 72 + 4
    assert "1 scales of activations in four bits are not used" in caplog.text


def test_without_a_scale_it_is_one(tmp_path: Path) -> None:
    with open_gguf(written(tmp_path / "model.gguf", {})) as source:
        plain = dequantize(quantize(weights(), QuantType.NVFP4), QuantType.NVFP4, (6, 128))
        np.testing.assert_array_equal(source.dequantize(f"{NAME}.weight"), plain)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (NAME, floats(1, 2), r"attn_q.scale: F32 of shape \(2,\), expected F32 and one scale$"),
        (STACK, floats(1, 2, 3), r"_exps.scale: F32 of shape \(3,\), expected .* one scale or 2$"),
    ],
)
def test_scales_of_another_shape(
    name: str, values: np.ndarray, message: str, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError, match=message):
        open_gguf(written(tmp_path / "model.gguf", {f"{name}.scale": values}))


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    scales = {f"{NAME}.scale": floats(np.nan)}
    with (
        open_gguf(written(tmp_path / "model.gguf", scales)) as source,
        pytest.raises(GGUFError, match=f"tensor {NAME}.scale: NaN or infinity among the scales"),
    ):
        source.raw(f"{NAME}.weight")
