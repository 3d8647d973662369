"""One step of the engine as a pure function: model, strategies and sampling, compiled once a bucket.

`step(params, pool, adapters, kv, drawn, parcels) -> (kv, result)`: KV pages are donated and updated in place; base
weights, adapter pages and the pool are read, and the tokens that the last step drew, so that a step can be begun before
the host has seen them. The whole step runs inside one shard_map over the mesh axis `tensor`:
every shard runs the same code on its own heads, widths and pages, and reductions are explicit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from memory_pool.layout import PageLayout
from memory_pool.link import TENSOR_AXIS
from memory_pool.near import near_data
from plora_jax.engine import kv_lanes, lora_lanes
from plora_jax.engine.batch import LORA_PHASES, StepTokens
from plora_jax.engine.buckets import PREFILL_BLOCK
from plora_jax.engine.packing import PackedArrays
from plora_jax.engine.params import MAX_LOGPROBS
from plora_jax.engine.sampling import SampledRows, SamplingBatch, sample, token_logprobs
from plora_jax.engine.traffic import PROMPT_SCOPE, groups_of
from plora_jax.model import Decoder, LayerConstants, Params, scopes
from plora_jax.parallel import EMBEDDING, HEAD
from strategies import apply, outer
from strategies.kernel_tables import Kernels, KernelSet
from strategies.kv_write import write_kv
from strategies.lanes import KvControl, KvLanes, LoraLane, Memory
from strategies.paged_attention import HeadMaths
from strategies.setting import AttentionSetting, LoraSetting
from strategies.traffic import any_scope


class PromptLogprobs(NamedTuple):
    """Scores of prompt tokens by prefill slot: [C], [C, MAX_LOGPROBS], [C, MAX_LOGPROBS]."""

    logprobs: Any
    top_ids: Any
    top_logprobs: Any


OVERFLOWED = -1
"""Stands for the token of a row whose numbers overflowed, so that no array of its own has to come back."""


class StepResult(NamedTuple):
    """What comes back to the host.

    Attributes:
        sampled: what was drawn; the token is OVERFLOWED where the row has no finite logits to draw from. There are
            tokens for the most rows of any bucket, so that every bucket can take them.
        prompt: scores of prompt tokens.
    """

    sampled: SampledRows
    prompt: PromptLogprobs


class StepSetting(NamedTuple):
    """What a step is built from, besides the model.

    Attributes:
        layout: of pages.
        max_rank: most rank components of an adapter on one pool device; 0 serves the base model only.
        kernels: implementations, on the device and near the data.
        width: W, decode rows of the widest bucket.
        near: something computes near the data; without it the program has no part there.
    """

    layout: PageLayout
    max_rank: int
    kernels: Kernels
    width: int
    near: bool = True

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Projections of a layer that adapters change, by the input that they share."""
        return groups_of(self.layout) if self.max_rank else ()

    def lora(self, kernels: KernelSet, group: Sequence[str]) -> LoraSetting:
        return LoraSetting(self.layout, tuple(group), self.max_rank, kernels, kernels if self.near else None)

    def attention(self, kernels: KernelSet) -> AttentionSetting:
        # Few pages of a prompt are away from the device, and the kernels of decode rows take any queries.
        return AttentionSetting(self.layout, kernels, self.kernels.decode if self.near else None)


class StepInputs(NamedTuple):
    """The parcels of a step, opened.

    Attributes:
        tokens: tokens, positions, pages that are written.
        kv: attention of the phases "decode" and "prefill", on the device.
        kv_control: the same in the pool; on the device where nothing computes near the data.
        lora: lanes by phase and strategy, on the device.
        lora_control: the same in the pool; `resident` has no part there, and none has where nothing computes there.
        sampling: options of the sampled rows.
    """

    tokens: StepTokens
    kv: Mapping[str, KvLanes]
    kv_control: Mapping[str, KvControl]
    lora: Mapping[str, Mapping[str, LoraLane]]
    lora_control: Mapping[str, Mapping[str, LoraLane]]
    sampling: SamplingBatch


def open_parcels(
    parcels: Mapping[str, jax.Array], packing: Mapping[str, PackedArrays], *, near: bool = True
) -> StepInputs:
    """Cuts the words of parcels into arrays again; those in the pool near the data.

    Args:
        parcels: words by the names of `BatchBuilder.build`.
        packing: how each was packed.
        near: something computes near the data, so that there are parcels in the pool.
    """
    trees: dict[str, Any] = {}
    for name, words in parcels.items():
        unpack = packing[name].unpack
        in_pool = near and (name.startswith("near_") or name == "kv")
        trees[name] = near_data(unpack)(words) if in_pool else unpack(words)
    tokens = trees["tokens"]
    kv = {phase: kv_lanes.join(getattr(tokens, phase), trees["missing"][phase]) for phase in ("decode", "prefill")}

    def lanes(prefix: str, phase: str) -> dict[str, LoraLane]:
        tables = trees[f"{prefix}tables.{phase}"]
        return {n: lora_lanes.join(part, tables[n]) for n, part in trees[f"{prefix}owners"][phase].items()}

    lora = {phase: lanes("", phase) for phase in LORA_PHASES}
    control = {phase: lanes("near_", phase) if near else {} for phase in LORA_PHASES}
    sampling = SamplingBatch(**trees["sampling"], **trees["sampling.bias"], **trees["sampling.history"])
    return StepInputs(tokens, kv, trees["kv"], lora, control, sampling)


class PagedContext:
    """The strategies of a packed batch, as the model sees them on one shard."""

    def __init__(
        self, decoder: Decoder, inputs: StepInputs, pool: jax.Array, adapters: jax.Array, *, setting: StepSetting
    ) -> None:
        self._config = decoder.parallel.shard_config
        self._inputs, self._setting = inputs, setting
        self._pool, self._adapters = pool, adapters
        self._rows = inputs.tokens.decode.positions.shape[0]
        # Found here, once, not by every layer.
        self._serving = {
            (phase, group): apply.serving(inputs.lora[phase], group, layout=setting.layout)
            for phase in ("decode", "prefill")
            for group in setting.groups
        }

    def positions(self) -> jax.Array:
        return self._inputs.tokens.positions

    def used(self) -> jax.Array | None:
        return self._inputs.tokens.used

    def embed_delta(self, tokens: jax.Array) -> jax.Array | None:
        if not self._setting.max_rank:
            return None
        setting = self._setting.lora(self._setting.kernels.decode, (EMBEDDING,))

        def serve(tokens: jax.Array) -> jax.Array:
            return self._outer(outer.embed_delta, tokens, "embed", setting)

        def nothing(tokens: jax.Array) -> jax.Array:
            return jnp.zeros((*tokens.shape, self._config.hidden_size), jnp.float32)

        with jax.named_scope(any_scope("embed")):
            return lax.cond(apply.is_used(self._inputs.lora["embed"]), serve, nothing, tokens)

    def is_finite(self, hidden_BD: jax.Array, logits_BV: jax.Array) -> jax.Array:
        """[B] bool, rows whose numbers did not overflow anywhere.

        The final norm gives zeros where the squares that it sums overflow, and NaN stays NaN; what it gives else is
        bounded, so that after it only an adapter of the head can overflow. The logits are not read without one.

        Args:
            hidden_BD: sampled rows after the final norm.
            logits_BV: theirs, whole.
        """
        squares_B = jnp.sum(jnp.square(hidden_BD.astype(jnp.float32)), axis=1)
        finite_B = (squares_B > 0) & jnp.isfinite(squares_B)
        if not self._setting.max_rank:
            return finite_B
        return finite_B & lax.cond(
            apply.is_used(self._inputs.lora["head"]),
            lambda logits: jnp.all(jnp.isfinite(logits), axis=1),
            lambda logits: jnp.ones(logits.shape[:1], bool),
            logits_BV,
        )

    def adapt_logits(
        self, logits: jax.Array, hidden: jax.Array, phase: str, owners: Mapping[str, Any] | None = None
    ) -> jax.Array:
        """Logits with what adapters add to the head: this shard's part of the vocabulary, float32.

        Args:
            logits: of rows.
            hidden: the rows [T, D] after the final norm.
            phase: "head" or "prompt".
            owners: by "lora" and "lora_control" and strategy, owners of the rows, where they are part of the phase's.
        """
        if not self._setting.max_rank:
            return logits
        setting = self._setting.lora(self._setting.kernels.decode, (HEAD,))

        def add(logits: jax.Array) -> jax.Array:
            return logits + self._outer(outer.head_delta, hidden, phase, setting, owners)

        with jax.named_scope(any_scope(phase)):
            return lax.cond(apply.is_used(self._inputs.lora[phase]), add, lambda logits: logits, logits)

    def _outer(
        self,
        function: Callable[..., jax.Array],
        x: jax.Array,
        phase: str,
        setting: LoraSetting,
        owners: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        memory = Memory(self._pool, self._adapters, None)
        total = None
        for name, lane in self._inputs.lora[phase].items():
            control = self._inputs.lora_control[phase].get(name)
            if owners is not None:
                lane = lane._replace(owner=owners["lora"][name])
                control = control and control._replace(owner=owners["lora_control"][name])
            control = control or lane
            part = function(x, memory, lane, control, strategy=name, scope=f"{phase}.{name}", setting=setting)
            total = part if total is None else total + part
        assert total is not None
        return total

    def adapt(self, sums: dict[str, jax.Array], x: jax.Array, layer: LayerConstants) -> dict[str, jax.Array]:
        group = tuple(name for name in sums if name in self._setting.layout.names)
        if not group or not self._setting.max_rank:
            return sums
        memory = Memory(self._pool, self._adapters, None)
        for phase, rows, kernels in self._phases(len(x)):
            added = apply.add(
                sums,
                x,
                memory,
                layer.index,
                self._inputs.lora[phase],
                {**self._inputs.lora[phase], **self._inputs.lora_control[phase]},
                serves=self._serving[phase, group],
                phase=phase,
                setting=self._setting.lora(kernels, group),
                first=rows.start,
            )
            sums = {**sums, **added}
        return sums

    def attend(
        self, cache: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerConstants
    ) -> tuple[jax.Array, jax.Array]:
        c, layout = self._config, self._setting.layout
        with jax.named_scope(scopes.KV_WRITE):
            cache = write_kv(cache, layer.index, k, v, self._inputs.tokens.write, layout=layout, used=self.used())
        maths = HeadMaths(c.query_scale, c.attention_soft_cap, layer.window)
        memory = Memory(self._pool, self._adapters, cache)
        parts = []
        for phase, rows, kernels in self._phases(len(q)):
            tokens, lanes = q[rows], self._inputs.kv[phase]
            with jax.named_scope(scopes.attention_of(phase)):
                out = apply.attend(
                    tokens.reshape(*lanes.device.positions.shape, c.num_heads, c.head_dim),
                    memory,
                    layer.index,
                    lanes,
                    self._inputs.kv_control[phase],
                    maths,
                    phase=phase,
                    setting=self._setting.attention(kernels),
                )
                parts.append(out.reshape(tokens.shape))
        return cache, jnp.concatenate(parts)

    def _phases(self, count: int) -> list[tuple[str, slice, KernelSet]]:
        """Where the decode rows and the prefill tokens are in packed arrays; a phase without room is left out."""
        kernels, rows = self._setting.kernels, self._rows
        phases = [("decode", slice(0, rows), kernels.decode), ("prefill", slice(rows, count), kernels.prefill)]
        return [phase for phase in phases if phase[1].start < phase[1].stop]


def known_tokens(tokens: StepTokens, drawn: jax.Array) -> StepTokens:
    """Has rows whose token the last step drew take it.

    Args:
        tokens: of a step.
        drawn: i32[W], the last step's; one that is OVERFLOWED counts as 0, as nobody looks at its row any more.
    """
    at_D = tokens.drawn_at
    taken_D = jnp.maximum(drawn.at[jnp.maximum(at_D, 0)].get(mode="promise_in_bounds"), 0)
    rows = at_D.shape[0]
    decode_D = jnp.where(at_D >= 0, taken_D, tokens.tokens[:rows])
    return tokens._replace(tokens=jnp.concatenate([decode_D, tokens.tokens[rows:]]))


def make_step(
    decoder: Decoder,
    dtype: Any,
    mesh: Mesh,
    *,
    setting: StepSetting,
    packing: Mapping[str, PackedArrays],
    param_specs: Mapping[str, Any],
) -> Callable[..., tuple[jax.Array, StepResult]]:
    """Builds the step of a model for one bucket.

    Args:
        decoder: of the model, over the shards of `mesh`.
        dtype: compute dtype of activations, KV and adapters.
        mesh: devices, with the axis `tensor`.
        setting: pages and kernels.
        packing: how the bucket's parcels are packed.
        param_specs: how the parameter tree lies over the mesh.

    Returns:
        A function (params, pool, adapters, kv, drawn, parcels) -> (kv, StepResult), to be jitted with `kv` donated.
    """

    def step(
        params: Params,
        pool: jax.Array,
        adapters: jax.Array,
        kv: jax.Array,
        drawn: jax.Array,
        parcels: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, StepResult]:
        with jax.named_scope(scopes.INPUTS):
            inputs = open_parcels(parcels, packing, near=setting.near)
            inputs = inputs._replace(tokens=known_tokens(inputs.tokens, drawn))
        context = PagedContext(decoder, inputs, pool, adapters, setting=setting)
        tokens = inputs.tokens
        with jax.named_scope(scopes.EMBED):
            x = decoder.embed(params, tokens.tokens, dtype, context=context)
        with jax.named_scope(scopes.LAYERS):
            hidden, kv = decoder.layers(params, x, kv, context)
        with jax.named_scope(scopes.HEAD):
            rows = hidden.at[tokens.sample_rows].get(mode="promise_in_bounds")
            logits = decoder.logits(params, rows, adapt=lambda logits: context.adapt_logits(logits, rows, "head"))
        with jax.named_scope(scopes.SAMPLE):
            sampled = sample(logits, inputs.sampling)
            token_ids = jnp.where(context.is_finite(rows, logits), sampled.token_ids, OVERFLOWED)
            token_ids = jnp.pad(token_ids, (0, setting.width - len(token_ids)))
            sampled = sampled._replace(token_ids=token_ids)
        prompt = _prompt_logprobs(decoder, params, hidden[tokens.decode.positions.shape[0] :], inputs, context)
        return kv, StepResult(sampled, prompt)

    sharded, whole = PartitionSpec(TENSOR_AXIS), PartitionSpec()
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(param_specs, sharded, sharded, sharded, whole, whole),
        out_specs=(sharded, whole),
        check_vma=False,
    )


def _prompt_logprobs(
    decoder: Decoder, params: Params, hidden_CD: jax.Array, inputs: StepInputs, context: PagedContext
) -> PromptLogprobs:
    """Scores of the prefill tokens, computed only when somebody asked; block by block to bound the logits."""
    slots = inputs.tokens.prompt_targets.shape[0]
    blocks = slots // PREFILL_BLOCK
    nothing = PromptLogprobs(
        jnp.zeros(slots), jnp.zeros((slots, MAX_LOGPROBS), jnp.int32), jnp.zeros((slots, MAX_LOGPROBS))
    )
    if not slots:
        return nothing

    def block(part: tuple[jax.Array, jax.Array, Any]) -> PromptLogprobs:
        hidden, targets, owners = part
        logits = decoder.logits(params, hidden, adapt=lambda x: context.adapt_logits(x, hidden, "prompt", owners))
        return PromptLogprobs(*token_logprobs(logits, targets))

    def score(_: None) -> PromptLogprobs:
        hidden = hidden_CD.reshape(blocks, PREFILL_BLOCK, -1)
        targets = inputs.tokens.prompt_targets.reshape(blocks, PREFILL_BLOCK)
        scored = lax.map(block, (hidden, targets, _owner_blocks(inputs, blocks)))
        return jax.tree.map(lambda x: x.reshape(slots, *x.shape[2:]), scored)

    with jax.named_scope(PROMPT_SCOPE):
        return lax.cond(inputs.tokens.any_prompt_logprobs, score, lambda _: nothing, None)


def _owner_blocks(inputs: StepInputs, blocks: int) -> dict[str, dict[str, jax.Array]]:
    """Owners of the prefill tokens by block, on the device and in the pool."""

    def cut(owner: jax.Array) -> jax.Array:
        return owner.reshape(blocks, PREFILL_BLOCK)

    return {
        "lora": {name: cut(lane.owner) for name, lane in inputs.lora["prompt"].items()},
        "lora_control": {name: near_data(cut)(lane.owner) for name, lane in inputs.lora_control["prompt"].items()},
    }
