"""Run by test_quantization.py in a process with four devices: an int8 model over shards against one device, as JSON."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from memory_pool.link import TENSOR_AXIS
from plora_jax.checkpoints import load_hf
from plora_jax.model import forward_full, pack_params, packed_specs
from plora_jax.parallel import TensorParallel

TOKENS = np.random.default_rng(0).integers(0, 250, (2, 24)).astype(np.int32)


def logits(directory: Path, shards: int) -> np.ndarray:
    config, params = load_hf(directory, dtype="float32")
    plan = TensorParallel(config, shards)
    mesh = Mesh(np.array(jax.devices()[:shards]), (TENSOR_AXIS,))
    packed = pack_params(plan.place(params, mesh), plan, quantization="int8")
    step = jax.shard_map(
        lambda p, t: forward_full(p, config, t, num_shards=shards)[None],
        mesh=mesh,
        in_specs=(packed_specs(packed, plan), PartitionSpec()),
        out_specs=PartitionSpec(TENSOR_AXIS),
        check_vma=False,
    )
    return np.asarray(jax.jit(step)(packed, TOKENS))


def main() -> None:
    alone = logits(Path(sys.argv[1]), 1)[0]
    over = logits(Path(sys.argv[1]), 4)
    same = bool((over.argmax(-1) == alone.argmax(-1)).all())
    print(json.dumps({"difference": float(np.abs(over - alone).max()), "same_argmax": same}))


main()
