"""A checkpoint saved on eight devices, restored on other numbers of them: in a process that has eight."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
    import sys
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from plora_jax.checkpoints import load_hf, load_orbax, save_orbax

    def sharding_over(count):
        mesh = jax.make_mesh((count,), ("tensor",), devices=jax.devices()[:count])
        def sharding_of(path, shape):
            split = path.startswith("layers.") and shape[1] % count == 0
            return NamedSharding(mesh, PartitionSpec(None, "tensor") if split else PartitionSpec())
        return sharding_of

    assert len(jax.devices()) == 8
    config, params = load_hf(sys.argv[1], dtype="float32", sharding_of=sharding_over(8))
    assert len(params["layers"]["q_proj"].sharding.device_set) == 8
    save_orbax(sys.argv[2], config, params)
    for count in (1, 2, 8):
        restored, arrays = load_orbax(sys.argv[2], dtype="float32", sharding_of=sharding_over(count))
        assert restored == config
        assert len(arrays["layers"]["q_proj"].sharding.device_set) == count
        assert isinstance(arrays["final_norm"].sharding, NamedSharding)
        jax.tree.map(np.testing.assert_array_equal, arrays, params)
    print("equal")
"""


@pytest.mark.slow
def test_checkpoint_saved_on_eight_devices_restores_equal_on_one_two_and_eight(pack, tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(pack / "models" / "llama"), str(tmp_path / "saved")],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip().endswith("equal")
