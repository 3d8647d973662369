"""Run by test_quantization.py in a process with four devices: a model over shards against one device, as JSON."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from memory_pool.link import TENSOR_AXIS
from plora_jax.checkpoints import load_config, load_model
from plora_jax.model import forward_full, keeps_blocks, pack_params, packed_specs
from plora_jax.parallel import TensorParallel

TOKENS = np.random.default_rng(0).integers(0, 250, (2, 24)).astype(np.int32)


def logits(path: Path, quantization: str, shards: int) -> np.ndarray:
    config = load_config(path)
    plan = TensorParallel(config, shards)
    mesh = Mesh(np.array(jax.devices()[:shards]), (TENSOR_AXIS,))
    loaded = load_model(
        path, dtype="float32", sharding_of=plan.sharding_of(mesh), keep_blocks=keeps_blocks(plan, quantization)
    )
    packed = pack_params(plan.place(loaded.params, mesh), plan, quantization=quantization)
    step = jax.shard_map(
        lambda p, t: forward_full(p, config, t, num_shards=shards)[None],
        mesh=mesh,
        in_specs=(packed_specs(packed, plan), PartitionSpec()),
        out_specs=PartitionSpec(TENSOR_AXIS),
        check_vma=False,
    )
    return np.asarray(jax.jit(step)(packed, TOKENS))


def main() -> None:
    path, quantization = Path(sys.argv[1]), sys.argv[2]
    alone = logits(path, quantization, 1)[0]
    found = []
    for shards in map(int, sys.argv[3:]):
        over = logits(path, quantization, shards)
        same = bool((over.argmax(-1) == alone.argmax(-1)).all())
        found.append({"difference": float(np.abs(over - alone).max()), "same_argmax": same})
    print(json.dumps(found))


main()
