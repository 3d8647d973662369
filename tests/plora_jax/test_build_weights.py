import jax
import numpy as np
import pytest

from plora_jax.checkpoints import WeightsError, load_config
from plora_jax.engine import build, build_weights
from plora_jax.engine.build import EngineConfig, build_engine
from plora_jax.engine.build_weights import read_weights, served_shapes
from plora_jax.engine.start import Progress, StagesInTurn
from plora_jax.parallel import TensorParallel


@pytest.mark.parametrize(
    ("model", "dtype", "quantization"),
    [
        ("llama", "float32", "none"),
        ("llama_tied", "bfloat16", "none"),
        ("qwen2_bias", "bfloat16", "int8"),
        ("mixtral", "bfloat16", "none"),
    ],
)
def test_weights_have_the_shapes_that_programs_were_told(pack, model, dtype, quantization):
    config = EngineConfig(model=str(pack / "models" / model), dtype=dtype, quantization=quantization)
    parallel, mesh = TensorParallel(load_config(config.model)), build._mesh(1)
    told = served_shapes(config, parallel, mesh, dtype=np.dtype(dtype), read=lambda: pytest.fail("read"))
    outer, params = read_weights(config, parallel, mesh, StagesInTurn(Progress(), "weights"), lambda: None)
    assert jax.tree.map(_described, params) == jax.tree.map(_described, told)
    assert set(outer) == {name for name in ("embedding", "head") if f"{name}" in parallel.config.param_shapes()}


def test_weights_that_cannot_be_read_end_a_start_before_programs_are_made(pack, monkeypatch):
    def refuse(*args, **kwargs):
        raise WeightsError("1 missing: layers.q_proj[0]")

    monkeypatch.setattr(build_weights, "load_model", refuse)
    monkeypatch.setattr(build, "JaxExecutor", lambda *args, **kwargs: pytest.fail("programs were made"))
    with pytest.raises(WeightsError, match="1 missing"):
        build_engine(EngineConfig(model=str(pack / "models" / "llama"), pool_memory_gb=0.0625, max_model_len=64))


def _described(array) -> tuple:
    return array.shape, str(array.dtype), array.sharding
