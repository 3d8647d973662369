"""python -m launch.convert: formats in, formats out, and what stops it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from launch.convert import Conversion, convert
from launch.flags import StartError
from plora_jax.adapters import load_adapter
from plora_jax.checkpoints import LoadedModel, load_config, load_model
from plora_jax.checkpoints.weights import flatten
from plora_jax.config import ConfigError
from plora_jax.tokenizer import load_tokenizer

PACK = pathlib.Path(__file__).parents[1] / "data" / "conformance"
GEMMA = PACK / "models" / "gemma3"


def assert_same_model(got: LoadedModel, wanted: LoadedModel) -> None:
    assert got.config == wanted.config
    left, right = flatten(got.params), flatten(wanted.params)
    assert left.keys() == right.keys()
    for path in right:
        np.testing.assert_array_equal(np.asarray(left[path]), np.asarray(right[path]), err_msg=path)


def test_convert_hf_to_orbax_and_back_gives_the_same_model_and_tokenizer(tmp_path: pathlib.Path) -> None:
    convert(Conversion(input=str(GEMMA), output=str(tmp_path / "o"), to="orbax"))
    convert(Conversion(input=str(tmp_path / "o"), output=str(tmp_path / "h"), to="hf"))
    wanted = load_model(GEMMA)
    assert_same_model(load_model(tmp_path / "o"), wanted)
    assert_same_model(load_model(tmp_path / "h"), wanted)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "h" / name).read_bytes() == (GEMMA / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h", "o"]


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_convert_with_dtype_publishes_that_dtype(tmp_path: pathlib.Path, to: str) -> None:
    convert(Conversion(input=str(GEMMA), output=str(tmp_path / "x"), to=to, dtype="bfloat16"))
    model = load_model(tmp_path / "x")
    assert (model.dtype, model.config.dtype) == ("bfloat16", "bfloat16")


def test_convert_default_gguf_writes_weights_and_tokenizer(tmp_path: pathlib.Path) -> None:
    convert(Conversion(input="default", output=str(tmp_path / "h"), to="hf"))
    fields = json.loads((tmp_path / "h" / "config.json").read_text())
    assert (fields["architectures"], fields["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    tokenizer = load_tokenizer(tmp_path / "h")
    assert tokenizer.decode([504, 3575, 282, 4649, 314, 7042, 30]) == "The capital of France is Paris."
    model = load_model(tmp_path / "h")
    assert (model.config.num_layers, model.config.rope.theta, model.dtype) == (30, 1e5, "bfloat16")
    got = np.asarray(model.params["layers"]["q_proj"][0, :3, 0], np.float32)
    np.testing.assert_allclose(got, [-0.0961914, -0.15918, -0.109375], rtol=1e-4)


def test_convert_adapter_to_orbax_and_back_keeps_its_matrices(tmp_path: pathlib.Path) -> None:
    base, path = str(PACK / "models" / "llama"), PACK / "adapters" / "rank_alpha_pattern"
    convert(Conversion(input=base, adapter=str(path), output=str(tmp_path / "o"), to="orbax"))
    convert(Conversion(input=base, adapter=str(tmp_path / "o"), output=str(tmp_path / "p"), to="hf"))
    wanted = load_adapter(path, name="x", config=load_config(base))
    for folder in ("o", "p"):
        got = load_adapter(tmp_path / folder, name="x", config=load_config(base))
        assert got.modules.keys() == wanted.modules.keys()
        for module, matrices in wanted.modules.items():
            assert got.modules[module].scale == pytest.approx(matrices.scale)
            np.testing.assert_array_equal(got.modules[module].a, matrices.a)
            np.testing.assert_array_equal(got.modules[module].b, matrices.b)


def test_convert_over_an_existing_output_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileExistsError, match="exists already; choose another path or remove it"):
        convert(Conversion(input=str(GEMMA), output=str(tmp_path), to="hf"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"to": "gguf"}, "--to=gguf is not supported; choose hf or orbax"), ({"input": ""}, "--input is missing")],
)
def test_convert_impossible_flags_are_refused(tmp_path: pathlib.Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        convert(Conversion(**({"input": str(GEMMA), "output": str(tmp_path / "x"), "to": "hf"} | change)))


def test_convert_that_fails_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'float64' is not supported"):
        convert(Conversion(input=str(GEMMA), output=str(tmp_path / "x"), to="hf", dtype="float64"))
    assert list(tmp_path.iterdir()) == []


def test_convert_command_line_fails_with_one_line(tmp_path: pathlib.Path) -> None:
    command = [
        sys.executable,
        "-m",
        "launch.convert",
        f"--input={tmp_path / 'no'}",
        "--to=hf",
        f"--output={tmp_path}/x",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'no'} does not exist, and nothing is downloaded; give a local")
    assert done.stderr.count("\n") == 1
