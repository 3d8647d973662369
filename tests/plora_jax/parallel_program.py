"""Run by test_parallel.py in a process with eight devices: prints one JSON object of measured differences.

Every case runs the model inside one shard_map and compares with the same call on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from memory_pool.link import TENSOR_AXIS, device_sharding
from plora_jax.checkpoints import load_hf
from plora_jax.config import ModelConfig
from plora_jax.model import Decoder, LoraWeights, forward_full, stack_as_raw
from plora_jax.model.dense import DenseContext
from plora_jax.parallel import EMBEDDING, HEAD, TensorParallel

PACK = Path(sys.argv[1])
TOKENS = np.random.default_rng(0).integers(0, 250, (2, 24)).astype(np.int32)
SHARDED, WHOLE = PartitionSpec(TENSOR_AXIS), PartitionSpec()
RANK = 3


def mesh_of(shards: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:shards]), (TENSOR_AXIS,))


def random_lora(config: ModelConfig) -> LoraWeights:
    """An adapter on every projection that changes the logits by about their own size."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    layers, sizes = config.num_layers, config.projections
    a = {name: draw(layers, RANK, inputs) for name, (_, inputs) in sizes.items()}
    b = {name: draw(layers, out, RANK) * 0.2 for name, (out, _) in sizes.items()}
    return LoraWeights(a, b, np.float32(1))


def cut_lora(lora: LoraWeights, plan: TensorParallel) -> LoraWeights:
    """Every shard's part, stacked on axis 0."""
    cuts = plan.cuts
    a = {n: np.stack([a[..., slice(*share)] for share in cuts[n].inputs]) for n, a in lora.a.items()}
    b = {n: np.stack([b[:, slice(*share)] for share in cuts[n].out]) for n, b in lora.b.items()}
    return LoraWeights(a, b, np.full(plan.num_shards, lora.scale))


def sharded(function, plan: TensorParallel, *, specs):
    """`function(params, ...)` over the shards; what comes back has one entry a shard."""
    return jax.jit(
        jax.shard_map(
            lambda params, *rest: function(params, *rest)[None],
            mesh=mesh_of(plan.num_shards),
            in_specs=(plan.param_specs(), *specs),
            out_specs=SHARDED,
            check_vma=False,
        )
    )


def compare(got: np.ndarray, wanted: np.ndarray) -> dict:
    """Largest difference, same argmax, and whether every shard has the same bits."""
    return {
        "difference": float(np.abs(got - wanted).max()),
        "same_argmax": bool((got[0].argmax(-1) == wanted.argmax(-1)).all()),
        "shards_agree": bool((got == got[:1]).all()),
    }


def model_cases(name: str) -> dict:
    """One model of the pack on 2, 4 and 8 shards, with an adapter and without."""
    config, params = load_hf(PACK / "models" / name, dtype="float32")
    return forward_cases(name, config, params)


def forward_cases(name: str, config: ModelConfig, params) -> dict:
    lora = random_lora(config)
    alone = jax.jit(lambda p, t, lo: forward_full(p, config, t, lora=lo))
    adapted = np.asarray(alone(params, TOKENS, lora))
    base = np.asarray(alone(params, TOKENS, lora._replace(scale=np.float32(0))))
    found: dict = {f"{name} changed": float(np.abs(adapted - base).max())}
    for shards in (2, 4, 8):
        plan = TensorParallel(config, shards)

        def shard(p, tokens, lo, shards=shards):
            own = jax.tree.map(lambda x: x[0], lo)
            return forward_full(p, config, tokens, lora=own, num_shards=shards)

        run = sharded(shard, plan, specs=(WHOLE, SHARDED))
        placed = plan.place(params, mesh_of(shards))
        parts = cut_lora(lora, plan)
        found[f"{name} {shards} lora"] = compare(np.asarray(run(placed, TOKENS, parts)), adapted)
        without = parts._replace(scale=parts.scale * 0)
        found[f"{name} {shards} base"] = compare(np.asarray(run(placed, TOKENS, without)), base)
    return found


class OuterContext(DenseContext):
    """DenseContext with an adapter on the embedding as well."""

    def __init__(self, config, positions, lora, embed_A, embed_B) -> None:
        super().__init__(config, positions, lora)
        self._embed = embed_A, embed_B

    def embed_delta(self, tokens):
        a_RV, b_DR = self._embed
        return 2.0 * jnp.einsum("RBT,DR->BTD", a_RV[:, tokens], b_DR)


def outer_cases() -> dict:
    """The pack's adapter on embedding and head against the golden logits, on 1, 2 and 8 shards."""
    folder = PACK / "adapters" / "embed_head_lora"
    stored = {
        k.removeprefix("base_model.model."): v for k, v in load_file(folder / "adapter_model.safetensors").items()
    }
    config, params = load_hf(PACK / "models" / "llama", dtype="float32")
    q = [
        np.stack([stored[f"model.layers.{i}.self_attn.q_proj.lora_{m}.weight"] for i in range(config.num_layers)])
        for m in "AB"
    ]
    embed = [stored[f"model.embed_tokens.lora_embedding_{m}"] for m in "AB"]
    head = [stored[f"lm_head.lora_{m}.weight"] for m in "AB"]
    golden = np.load(folder / "golden.npz")
    tokens, wanted = golden["prompt_2"][None], golden["logits_2"]
    found = {}
    for shards in (1, 2, 8):
        plan = TensorParallel(config, shards)
        lora = LoraWeights({"q_proj": q[0]}, {"q_proj": q[1]}, np.float32(2))
        assert plan.cuts[EMBEDDING].out[0] == (0, config.hidden_size)
        head_b = np.stack([head[1][slice(*share)] for share in plan.cuts[HEAD].out])

        def shard(p, lo, b, shards=shards):
            decoder = Decoder(config, num_shards=shards)
            lo, b_VR = jax.tree.map(lambda x: x[0], (lo, b))
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            context = OuterContext(decoder.parallel.shard_config, positions, lo, *map(jnp.asarray, embed))
            x = decoder.embed(p, jnp.asarray(tokens), np.float32, context=context)
            hidden, _ = decoder.layers(p, x, (), context)
            delta = 2.0 * jnp.einsum("BTD,RD,VR->BTV", hidden, head[0], b_VR)
            return decoder.logits(p, hidden, adapt=delta.__add__)

        placed = plan.place(params, mesh_of(shards))
        logits = sharded(shard, plan, specs=(SHARDED, SHARDED))(placed, cut_lora(lora, plan), head_b)
        found[f"outer {shards}"] = compare(np.asarray(logits)[:, 0, -len(wanted) :], wanted)
    return found


def soft_capped_head_case() -> dict:
    """A head delta goes in before the final soft cap, on a tied head whose vocabulary is sharded."""
    config, params = load_hf(PACK / "models" / "gemma2", dtype="float32")
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(5, config.hidden_size)).astype(np.float32)
    delta = (rng.normal(size=(5, config.vocab_size)) * 40).astype(np.float32)
    cap = config.final_soft_cap
    assert cap is not None
    wanted = cap * np.tanh((hidden @ np.asarray(params["embedding"]).T + delta) / cap)
    plan = TensorParallel(config, 4)

    def shard(p, x, d):
        return Decoder(config, num_shards=4).logits(p, x, adapt=lambda logits: logits + d)

    run = sharded(shard, plan, specs=(WHOLE, PartitionSpec(None, TENSOR_AXIS)))
    return {"soft cap": compare(np.asarray(run(plan.place(params, mesh_of(4)), hidden, delta)), wanted)}


def odd_vocabulary_cases() -> dict:
    """A vocabulary that no number of shards divides: embedding and head whole on every shard."""
    config, params = load_hf(PACK / "models" / "llama", dtype="float32")
    config = dataclasses.replace(config, vocab_size=251)
    return forward_cases(
        "odd vocabulary",
        config,
        {**params, "embedding": params["embedding"][:251], "head": params["head"][:251]},
    )


def loading_cases() -> dict:
    """What `load_hf` reads straight into the shards is placed as it is, and equals what `place` makes of the whole."""
    found = {}
    for shards in (2, 8):
        mesh = mesh_of(shards)
        config, whole = load_hf(PACK / "models" / "qwen2_bias", dtype="bfloat16")
        plan = TensorParallel(config, shards)
        _, read = load_hf(PACK / "models" / "qwen2_bias", dtype="bfloat16", sharding_of=plan.sharding_of(mesh))
        pointers = jax.tree.map(pointers_of, read)
        placed, other = plan.place(read, mesh), plan.place(stack_as_raw(whole), mesh)
        bits = stack_as_raw(placed)
        specs = jax.tree.leaves(plan.param_specs())
        found[f"loading {shards}"] = {
            "no_copy": jax.tree.map(pointers_of, placed) == pointers,
            "equal": all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), bits, other))),
            "wrong_specs": [
                leaf.sharding == device_sharding(mesh, spec)
                for leaf, spec in zip(jax.tree.leaves(placed), specs, strict=True)
            ].count(False),
            "named": all(isinstance(leaf.sharding, NamedSharding) for leaf in jax.tree.leaves(read)),
            "k_rows": placed["layers"]["k_proj"].addressable_shards[0].data.shape[1],
            "k_bias": placed["layers"]["k_proj_bias"].shape[1],
            "f_rows": placed["layers"]["gate_proj"].addressable_shards[0].data.shape[1],
        }
    return found


def pointers_of(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def low_precision_case() -> dict:
    """A table in bfloat16, looked up over shards, bit for bit."""
    config, params = load_hf(PACK / "models" / "gemma2", dtype="bfloat16")
    plan = TensorParallel(config, 8)

    def embed(p, tokens, shards=8):
        return Decoder(config, num_shards=shards).embed(p, tokens, jnp.bfloat16)

    wanted = jax.jit(functools.partial(embed, shards=1))(params, TOKENS)
    got = sharded(embed, plan, specs=(WHOLE,))(plan.place(params, mesh_of(8)), TOKENS)
    return {"bfloat16 look-up": bool((np.asarray(got) == np.asarray(wanted)).all())}


def main() -> None:
    found = {}
    for folder in sorted((PACK / "models").iterdir()):
        found |= model_cases(folder.name)
    for cases in (outer_cases, soft_capped_head_case, odd_vocabulary_cases, loading_cases, low_precision_case):
        found |= cases()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
