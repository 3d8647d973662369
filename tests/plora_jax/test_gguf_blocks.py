"""Tensors of 4 bits: their blocks against the gguf package, what a load keeps of them, and what it refuses."""

from __future__ import annotations

import pathlib

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.checkpoints import WeightsError, load_config, load_model
from plora_jax.checkpoints.gguf_blocks import BLOCKS_OF, to_blocks
from plora_jax.gguf_file import GgufTensor
from plora_jax.model import keeps_blocks
from plora_jax.parallel import TensorParallel
from strategies.block_weights import dequantize
from tests.plora_jax.gguf_files import MODELS, converted, write

Kind = gguf.GGMLQuantizationType


def tensor(kind: str, out: int = 6, inputs: int = 512) -> tuple[GgufTensor, np.ndarray]:
    """A random tensor of a type, and what the gguf package makes of it."""
    rng = np.random.default_rng(0)
    if kind == "Q4_K":  # Which the package does not write: any bits whose two shared numbers are finite.
        data = rng.integers(0, 256, (out, inputs // 256, 144), np.uint8)
        data[..., :4] = rng.uniform(1e-3, 2e-3, (out, inputs // 256, 2)).astype(np.float16).view(np.uint8)
        data = data.reshape(out, -1)
    else:
        data = gguf.quants.quantize(rng.standard_normal((out, inputs), np.float32), Kind[kind])
    return GgufTensor("t", (out, inputs), Kind[kind], data), gguf.quants.dequantize(data, Kind[kind])


@pytest.mark.parametrize("kind", BLOCKS_OF)
def test_to_blocks_keeps_the_weights(kind: str) -> None:
    stored, wanted = tensor(kind)
    blocks = to_blocks(stored)
    assert (blocks.shape, blocks.dtype) == ((6, 16, 20), np.uint8)
    found = np.asarray(dequantize(jnp.asarray(blocks)))
    if kind != "Q4_K":
        np.testing.assert_array_equal(found, wanted)
    # The scales of Q4_K have 17 bits at most, and float16 has 11.
    np.testing.assert_allclose(found, wanted, atol=2**-11 * 2 * np.abs(wanted).max())


def kinds_of(**kinds: str) -> dict[str, str]:
    """Types by tensor of the llama model, from those by its kind."""
    config = load_config(MODELS / "llama")
    return {name: kind for name in converted("llama", config) for part, kind in kinds.items() if f".{part}." in name}


def load(path: pathlib.Path, shards: int = 1):
    return load_model(path, keep_blocks=keeps_blocks(TensorParallel(load_config(path), shards), "gguf"))


def test_load_model_keeps_the_blocks_of_projections_that_have_them_in_all_layers(tmp_path: pathlib.Path) -> None:
    kinds = kinds_of(attn_q="Q4_1", attn_k="Q4_0", attn_v="Q8_0", ffn_up="Q4_1", token_embd="Q4_1")
    kinds["blk.1.ffn_up.weight"] = "Q8_0"
    write(tmp_path / "m.gguf", "llama", kinds=kinds)
    told: list[tuple[int, int]] = []
    keep = keeps_blocks(TensorParallel(load_config(tmp_path)), "gguf")
    kept = load_model(tmp_path, keep_blocks=keep, progress=lambda done, total: told.append((done, total)))
    whole = load_model(tmp_path, dtype="float32")
    layers = kept.params["layers"]
    assert {name for name, value in layers.items() if value.dtype == jnp.uint8} == {"q_proj", "k_proj"}
    assert kept.params["embedding"].dtype == jnp.bfloat16
    for name in ("q_proj", "k_proj"):  # Whose rows the file has in another order.
        np.testing.assert_array_equal(dequantize(layers[name]), whole.params["layers"][name])
    size = sum(leaf.nbytes for leaf in [*layers.values(), *(v for n, v in kept.params.items() if n != "layers")])
    assert told[-1] == (size, size)


def test_load_model_without_blocks_to_keep_says_what_there_is(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "m.gguf", "llama", kinds=kinds_of(attn_q="Q8_0"))
    with pytest.raises(WeightsError) as error:
        load(tmp_path)
    assert str(error.value).startswith("--quantization gguf keeps projections of type Q4_0, Q4_1, Q4_K, and ")
    assert str(error.value).endswith("m.gguf has them as F32, Q8_0: use --quantization int8")
    with pytest.raises(WeightsError, match=r"keeps the 4-bit blocks of a GGUF file, and .* is none: use --q"):
        load(MODELS / "llama")


def test_blocks_that_the_shards_cannot_share_are_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "m.gguf", "llama", kinds=kinds_of(attn_q="Q4_1", attn_output="Q4_1"))
    assert load(tmp_path, 2).params["layers"]["o_proj"].dtype == jnp.uint8
    says = (
        "--quantization gguf cannot share 2 blocks of inputs of o_proj among --tensor_parallel_size 4: lower that, or "
        "use --quantization int8"
    )
    with pytest.raises(ValueError, match=says):
        load(tmp_path, 4)
