"""What a step moves over the link, declared from what the host knows: the formulas of all strategies, for the ledger.

The audit counts the same program independently; tests hold the two together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from memory_pool.adapter_pool import PlacedAdapter
from memory_pool.layout import PageLayout
from plora_jax.config import ModelConfig
from plora_jax.engine.batch import StepUse
from plora_jax.engine.buckets import PREFILL_BLOCK, BatchShape, Bucket
from plora_jax.engine.kv_lanes import KvPacker
from plora_jax.engine.lora_lanes import AdapterUse
from strategies import kv_traffic, outer_traffic, traffic
from strategies.strategy_table import ATTENTION, LORA

LAYER_GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Projections of a decoder layer by the input that they share."""


def groups_of(layout: PageLayout) -> traffic.Groups:
    """The groups that a model has."""
    return tuple(group for group in LAYER_GROUPS if group[0] in layout.names)


PROMPT_SCOPE = "prompt_logprobs"
"""Name under which the scores of prompts are in the trace."""


class StepTraffic:
    """The link bytes of one bucket's steps.

    Args:
        bucket: sizes of the program.
        shape: sizes that all buckets share.
        config: of one shard of the model.
        num_shards: of the mesh axis `tensor`.
    """

    def __init__(self, bucket: Bucket, shape: BatchShape, *, config: ModelConfig, num_shards: int) -> None:
        self._shape, self._shards = shape, num_shards
        rows, blocks = bucket.decode_rows, bucket.prefill_tokens // PREFILL_BLOCK
        prompts = min(blocks, shape.max_num_seqs)
        groups = groups_of(shape.layout)
        sizes = {
            "decode": (rows, rows),
            "prefill": (bucket.prefill_tokens, prompts),
            "embed": (bucket.tokens, rows + prompts),
            "head": (rows, rows),
            "prompt": (bucket.prefill_tokens, prompts),
        }
        self._prompt_blocks = blocks
        self._lora = {
            phase: self._lora_bucket(phase, tokens, entries, groups if phase in ("decode", "prefill") else ())
            for phase, (tokens, entries) in sizes.items()
        }
        self._kv = {
            "decode": self._kv_bucket("decode", rows, 1, config),
            "prefill": self._kv_bucket("prefill", blocks, PREFILL_BLOCK, config),
        }
        self._facts: dict[tuple[str, str], tuple[list[PlacedAdapter], traffic.LaneFacts]] = {}

    def of(self, use: StepUse) -> Iterator[traffic.Bytes]:
        """The bytes of one step by what moves, control tables apart, which are counted when they are sent."""
        # Where nothing computes near the data, nothing has to be told there what to do.
        return (part for part in self._all(use) if self._shape.near or part[0].object != "control")

    def _all(self, use: StepUse) -> Iterator[traffic.Bytes]:
        for phase, by_strategy in use.lora.items():
            for name, adapters in by_strategy.items():
                yield from self._of_lane(phase, name, self._lora_use(phase, name, adapters))
        for phase, kv in (("decode", use.decode), ("prefill", use.prefill)):
            for strategy in ATTENTION.values():
                yield from strategy.traffic(self._kv[phase], kv)

    def loop_counts(self, use: StepUse) -> dict[str, int]:
        """How often what is data in the program runs, for `memory_pool.audit`."""
        counts = {PROMPT_SCOPE: int(bool(use.lora["prompt"]))}
        for phase, by_strategy in use.lora.items():
            uses = {name: self._lora_use(phase, name, adapters) for name, adapters in by_strategy.items()}
            if phase in ("decode", "prefill"):
                counts |= traffic.lora_loop_counts(self._lora[phase], uses)
            else:
                counts |= outer_traffic.loop_counts(self._lora[phase], uses)
        for phase, kv in (("decode", use.decode), ("prefill", use.prefill)):
            counts |= kv_traffic.kv_loop_counts(self._kv[phase], kv)
        return counts

    def _of_lane(self, phase: str, name: str, use: traffic.LoraUse) -> Sequence[traffic.Bytes]:
        bucket = self._lora[phase]
        if phase == "embed":
            return outer_traffic.embedding(bucket, name, use)
        if phase == "head":
            return outer_traffic.head(bucket, name, use)
        if phase == "prompt":
            return outer_traffic.head(bucket, name, use, calls=self._prompt_blocks)
        return LORA[name].traffic(bucket, use)

    def _lora_use(self, phase: str, name: str, adapters: Sequence[AdapterUse]) -> traffic.LoraUse:
        placed = [use.placed for use in adapters]
        known = self._facts.get((phase, name))
        # The placements themselves are kept: the id of one that is gone may be that of another.
        if known is None or len(known[0]) != len(placed) or any(map(operator.is_not, known[0], placed)):
            known = placed, traffic.lane_facts(placed)
            self._facts[phase, name] = known
        return traffic.LoraUse([use.tokens for use in adapters], known[1])

    def _lora_bucket(
        self, phase: str, tokens: int, entries: int, groups: tuple[tuple[str, ...], ...]
    ) -> traffic.LoraBucket:
        lane = self._shape.lane(tokens, entries)
        return traffic.LoraBucket(
            phase=phase,
            tokens=tokens,
            layout=self._shape.layout,
            groups=groups,
            max_rank=-(-self._shape.max_rank // self._shape.stripes),
            entries=entries,
            a_pages=lane.a_pages,
            b_pages=lane.b_pages,
            stripes=lane.stripes,
            shards=self._shards,
        )

    def _kv_bucket(self, phase: str, groups: int, queries: int, config: ModelConfig) -> kv_traffic.KvBucket:
        shape = self._shape.kv(groups, queries)
        return kv_traffic.KvBucket(
            phase=phase,
            groups=groups,
            queries=queries,
            heads=config.num_heads,
            layout=self._shape.layout,
            table_pages=shape.table_pages,
            stream_pages=KvPacker.stream_pages(shape),
            pool_devices=shape.pool_devices,
            shards=self._shards,
        )
