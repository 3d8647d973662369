"""From a plan to the arrays of one step.

A step's tokens are packed: first one token for each decode row, then prefill blocks, each block from one sequence.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memory_pool.adapter_pool import PlacedAdapter
from plora_jax.engine.buckets import PREFILL_BLOCK, BatchShape, Bucket, prefill_slots
from plora_jax.engine.kv_lanes import KvPacker, KvShape
from plora_jax.engine.lora_lanes import AdapterUse, LanePacker, Lanes
from plora_jax.engine.plan import Row, StepPlan
from plora_jax.engine.plan import Sequence as PlannedSequence
from plora_jax.engine.sampling_batch import SamplingBatch, is_plain, make_sampling_batch
from plora_jax.parallel import EMBEDDING, HEAD
from strategies.kv_traffic import KvUse
from strategies.kv_write import KvWrite
from strategies.lanes import AttentionLane


class StepTokens(NamedTuple):
    """The tokens of a step.

    Attributes:
        tokens: [T] int32.
        drawn_at: [D] int32, for decode rows whose token is what the last step drew: at which index; -1 for the others.
        positions: [T] int32.
        write: where the keys and values of each token go.
        sample_rows: [D] int32, token whose logits each sampled row draws from.
        prompt_targets: [C] int32, the token that follows each prefill token, for prompt log-probabilities.
        any_prompt_logprobs: [] bool.
        used: [] int32, tokens up to the last that is somebody's.
        decode: D groups of one query, and the pages on the device.
        prefill: C / PREFILL_BLOCK groups of PREFILL_BLOCK queries, and the pages on the device.
    """

    tokens: Any
    drawn_at: Any
    positions: Any
    write: KvWrite
    sample_rows: Any
    prompt_targets: Any
    any_prompt_logprobs: Any
    used: Any
    decode: AttentionLane
    prefill: AttentionLane


class Parcel(NamedTuple):
    """Arrays that are sent together.

    Attributes:
        in_pool: for near-data functions; else for the device.
        tree: pytree of numpy arrays.
        key: None for what is sent with each step; else equal keys mean equal content, which need not be sent again.
    """

    in_pool: bool
    tree: Any
    key: Hashable | None = None


class StepUse(NamedTuple):
    """What a step does with the link, for the ledger.

    Attributes:
        lora: adapters and their tokens by phase and strategy.
        decode: attention of the decode rows.
        prefill: attention of the prefill tokens.
    """

    lora: Mapping[str, Mapping[str, Sequence[AdapterUse]]]
    decode: KvUse
    prefill: KvUse


class BuiltStep(NamedTuple):
    """A plan as arrays.

    Attributes:
        parcels: by name; names and shapes are those of the bucket, whatever the plan.
        sampling: options of the sampled rows, as the parcels have them.
        use: for the ledger.
        sampled: for each row of the plan the index of its sampled row, or -1.
        firsts: for each row of the plan the index of its first token.
        prompt_targets: [C] int32, the tokens whose log-probabilities were asked for; None where nobody asked.
    """

    parcels: Mapping[str, Parcel]
    sampling: SamplingBatch
    use: StepUse
    sampled: list[int]
    firsts: list[int]
    prompt_targets: np.ndarray | None


LORA_PHASES = ("decode", "prefill", "embed", "head", "prompt")
"""Where adapters take part: decode rows, prefill tokens, the embedding of all tokens, the head of sampled rows, and the
head of prefill tokens whose log-probabilities are asked for."""


class BatchBuilder:
    """Makes the arrays of one bucket.

    Args:
        bucket: sizes of the program.
        shape: sizes that all buckets share.
        lora_strategies: names; none serves the base model only.
        attention_of: strategy for a sequence's pages that are not on the device.
    """

    def __init__(
        self,
        bucket: Bucket,
        shape: BatchShape,
        *,
        lora_strategies: Sequence[str],
        attention_of: Callable[[PlannedSequence], str],
    ) -> None:
        self.bucket, self.shape, self._attention_of = bucket, shape, attention_of
        blocks = bucket.prefill_tokens // PREFILL_BLOCK
        rows, prompts = bucket.decode_rows, min(blocks, shape.max_num_seqs)
        self._kv_shapes = shape.kv(rows, 1), shape.kv(blocks, PREFILL_BLOCK)
        lanes = {
            "decode": shape.lane(rows, rows),
            "prefill": shape.lane(bucket.prefill_tokens, prompts),
            "embed": shape.lane(bucket.tokens, rows + prompts),
            "head": shape.lane(rows, rows),
            "prompt": shape.lane(bucket.prefill_tokens, prompts),
        }
        self._packers = {name: LanePacker(lanes[name], lora_strategies) for name in LORA_PHASES}
        # Of the last step: the next one has the same lanes more often than not.
        self._lane_parcels: tuple[list[Lanes], dict[str, Parcel]] = [], {}

    def build(
        self, plan: StepPlan, *, placed: Callable[[int], PlacedAdapter], drawn_at: Mapping[int, int] | None = None
    ) -> BuiltStep:
        """Packs a plan.

        Args:
            plan: rows that the bucket holds, decode rows first.
            placed: where an adapter is, by its identity.
            drawn_at: for a plan made ahead, by sequence, where the last step draws the row's token.
        """
        packer = _Packer(self.bucket, self._kv_shapes, self._attention_of, page_tokens=self.shape.layout.page_tokens)
        decodes = list(itertools.takewhile(lambda row: row.decode, plan.rows))
        packer.add_decodes(decodes, drawn_at)
        for row in plan.rows[len(decodes) :]:
            packer.add_prefill(row)
        decode, prefill = packer.decode.finish(), packer.prefill.finish()
        tokens = StepTokens(
            tokens=packer.tokens,
            drawn_at=packer.drawn_at,
            positions=packer.positions,
            write=KvWrite(packer.pages, packer.offsets),
            sample_rows=packer.sample_rows,
            prompt_targets=packer.prompt_targets,
            any_prompt_logprobs=np.bool_(packer.want_prompt),
            used=np.int32(packer.used),
            decode=decode.lane,
            prefill=prefill.lane,
        )
        lanes = self._lanes(packer, placed)
        sampling = make_sampling_batch(
            packer.sampling_rows,
            rows_padded=self.bucket.decode_rows,
            max_len=self.shape.max_model_len,
            unknown=int(plan.ahead),
        )
        elsewhere = "none" if not (decode.use.any or prefill.use.any) else None
        parcels = {
            "tokens": Parcel(False, tokens),
            "missing": Parcel(False, {"decode": decode.missing, "prefill": prefill.missing}, elsewhere),
            "kv": Parcel(self.shape.near, {"decode": decode.control, "prefill": prefill.control}, elsewhere),
            **self._parcels_of(lanes),
            **_sampling_parcels(sampling),
        }
        use = StepUse({phase: lane.use for phase, lane in lanes.items()}, decode.use, prefill.use)
        targets = packer.prompt_targets if packer.want_prompt else None
        return BuiltStep(parcels, sampling, use, packer.sampled, packer.firsts, targets)

    def _parcels_of(self, lanes: Mapping[str, Lanes]) -> dict[str, Parcel]:
        known, parcels = self._lane_parcels
        found = list(lanes.values())
        if len(known) != len(found) or not all(map(operator.is_, known, found)):
            parcels = _lane_parcels(lanes, near=self.shape.near)
            self._lane_parcels = found, parcels
        return parcels

    def _lanes(self, packer: _Packer, placed: Callable[[int], PlacedAdapter]) -> dict[str, Lanes]:
        rows, names = self.bucket.decode_rows, self.shape.layout.names
        if not self.shape.max_rank:
            return {phase: packer_.empty for phase, packer_ in self._packers.items()}
        sampled = np.zeros(rows, np.int64)
        sampled[: len(packer.sampling_rows)] = [seq.adapter_id for seq in packer.sampling_rows]
        return {
            "decode": self._packers["decode"].lanes(packer.owners[:rows], placed),
            "prefill": self._packers["prefill"].lanes(packer.owners[rows:], placed),
            "embed": self._packers["embed"].lanes(packer.owners, placed, changes=names.index(EMBEDDING)),
            "head": self._packers["head"].lanes(sampled, placed, changes=names.index(HEAD)),
            "prompt": self._packers["prompt"].lanes(packer.scored, placed, changes=names.index(HEAD)),
        }


def _lane_parcels(lanes: Mapping[str, Lanes], *, near: bool) -> dict[str, Parcel]:
    """Owners together, since they change with each step's rows; tables by phase, since they seldom change."""
    quiet = "nobody" if not any(lane.use for lane in lanes.values()) else None
    parcels = {}
    for in_pool, prefix in ((False, ""), (True, "near_"))[: 2 if near else 1]:

        def taken(by_strategy: Mapping[str, Any], in_pool: bool = in_pool) -> dict[str, Any]:
            return {name: part for name, part in by_strategy.items() if not in_pool or name != "resident"}

        owners = {phase: taken(lane.tokens) for phase, lane in lanes.items()}
        parcels[f"{prefix}owners"] = Parcel(in_pool, owners, quiet)
        for phase, lane in lanes.items():
            parcels[f"{prefix}tables.{phase}"] = Parcel(in_pool, taken(lane.tables), lane.key)
    return parcels


def _sampling_parcels(sampling: SamplingBatch) -> dict[str, Parcel]:
    """What is wide goes apart from the rest: few rows have a history or a bias."""
    fields = sampling._asdict()
    bias = {name: fields.pop(name) for name in ("bias_ids", "bias_values")}
    history = {"history": fields.pop("history")}
    return {
        "sampling": Parcel(False, fields, "plain" if is_plain(sampling) else None),
        "sampling.bias": Parcel(False, bias, None if sampling.any_bias else "none"),
        "sampling.history": Parcel(False, history, None if sampling.any_penalty else "none"),
    }


class _Packer:
    """Fills the arrays of a step row by row."""

    def __init__(
        self,
        bucket: Bucket,
        shapes: tuple[KvShape, KvShape],
        attention_of: Callable[[PlannedSequence], str],
        *,
        page_tokens: int,
    ) -> None:
        self._bucket, self._page_tokens = bucket, page_tokens
        self.tokens, self.positions, self.pages, self.offsets = np.zeros((4, bucket.tokens), np.int32)
        self.owners = np.zeros(bucket.tokens, np.int64)
        self.scored = np.zeros(bucket.prefill_tokens, np.int64)
        self.decode, self.prefill = (KvPacker(shape, attention_of) for shape in shapes)
        self.sample_rows = np.zeros(bucket.decode_rows, np.int32)
        self.drawn_at = np.full(bucket.decode_rows, -1, np.int32)
        self.prompt_targets = np.zeros(bucket.prefill_tokens, np.int32)
        self.want_prompt = False
        self.sampling_rows: list[PlannedSequence] = []
        self.sampled: list[int] = []
        self.firsts: list[int] = []
        self._blocks = self.used = 0

    def add_decodes(self, rows: Sequence[Row], drawn_at: Mapping[int, int] | None) -> None:
        """Writes the tokens of all decode rows, which come first and all sample; or where they are drawn."""
        if not rows:
            return
        sequences, count = [row.sequence for row in rows], len(rows)
        positions = np.array([row.start for row in rows], np.int32)
        if drawn_at is None:
            self.tokens[:count] = [row.sequence.token(row.start) for row in rows]
        else:
            self.drawn_at[:count] = [drawn_at[sequence.seq_id] for sequence in sequences]
        self.positions[:count] = positions
        self.owners[:count] = [sequence.adapter_id for sequence in sequences]
        self.pages[:count] = self.decode.place_each(sequences, positions)
        self.offsets[:count] = positions % self._page_tokens
        self.sample_rows[:count] = np.arange(count)
        self.sampling_rows += sequences
        self.sampled += range(count)
        self.firsts += range(count)
        self.used = count

    def add_prefill(self, row: Row) -> None:
        """Writes the tokens of a chunk of a prompt."""
        at = self._place(row)
        self.used = max(self.used, at + row.count)
        self.firsts.append(at)
        self.sampled.append(len(self.sampling_rows) if row.samples else -1)
        if row.samples:
            self.sample_rows[len(self.sampling_rows)] = at + row.count - 1
            self.sampling_rows.append(row.sequence)
        if row.sequence.sampling.prompt_logprobs is not None:
            self._want_scores(row, at - self._bucket.decode_rows)

    def _place(self, row: Row) -> int:
        sequence = row.sequence
        positions = np.arange(row.start, row.start + row.count, dtype=np.int32)
        groups = prefill_slots(row.count) // PREFILL_BLOCK
        at = self._bucket.decode_rows + self._blocks * PREFILL_BLOCK
        self.prefill.place(sequence, positions, group=self._blocks, groups=groups)
        self._blocks += groups
        here = slice(at, at + row.count)
        self.tokens[here] = [sequence.token(p) for p in range(row.start, row.start + row.count)]
        self.positions[here] = positions
        self.owners[here] = sequence.adapter_id
        assert sequence.kv is not None, sequence.seq_id
        self.pages[here] = sequence.kv.device_table()[positions // self._page_tokens]
        self.offsets[here] = positions % self._page_tokens
        return at

    def _want_scores(self, row: Row, start: int) -> None:
        self.want_prompt = True
        self.scored[start : start + row.count] = row.sequence.adapter_id
        known = min(row.start + row.count + 1, row.sequence.num_tokens)
        targets = [row.sequence.token(p) for p in range(row.start + 1, known)]
        self.prompt_targets[start : start + len(targets)] = targets
