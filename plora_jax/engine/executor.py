"""Carries out plans with JAX: packs a plan, runs the compiled step of its bucket, unpacks what was sampled."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from memory_pool import heap, huge_pages, link
from memory_pool.adapter_pool import AdapterPool, PlacedAdapter
from memory_pool.ledger import Crossing, Ledger
from memory_pool.link import device_sharding, pool_sharding, store_in_pool, store_on_device
from memory_pool.page_memory import PageMemory
from plora_jax.config import ModelConfig
from plora_jax.engine import annotations
from plora_jax.engine.annotations import annotate
from plora_jax.engine.batch import BatchBuilder, BuiltStep
from plora_jax.engine.buckets import PREFILL_BLOCK, BatchShape, Bucket, lattice, pick_bucket
from plora_jax.engine.kept_programs import KeptPrograms, described
from plora_jax.engine.near_guard import NearDataGuard
from plora_jax.engine.outputs import TokenLogprobs
from plora_jax.engine.packing import PackedArrays
from plora_jax.engine.plan import KvLostError, Row, RowResult, StepPlan
from plora_jax.engine.plan import Sequence as PlannedSequence
from plora_jax.engine.step import OVERFLOWED, PromptLogprobs, StepResult, StepSetting, make_step
from plora_jax.engine.traffic import StepTraffic
from plora_jax.model import Decoder, Params, packed_specs
from strategies.kernel_tables import Kernels, choose_kernels
from strategies.strategy_table import LORA

logger = logging.getLogger(__name__)


class Program(NamedTuple):
    """What one bucket is run with.

    Attributes:
        builder: makes its arrays.
        packing: how its parcels are packed.
        traffic: declares its link bytes.
        run: the compiled step.
    """

    builder: BatchBuilder
    packing: Mapping[str, PackedArrays]
    traffic: StepTraffic
    run: Any


class _Flight(NamedTuple):
    """A step that is under way."""

    plan: StepPlan
    bucket: Bucket
    built: BuiltStep
    result: StepResult


class JaxExecutor:
    """The real executor.

    Args:
        config: of the model.
        params: shapes, dtypes and shardings of the parameters that `serve` is given (`packed_shapes`).
        dtype: compute dtype of activations, KV and adapters.
        memory: page arrays; the step reads them and gives the KV pages back.
        max_num_seqs: rows of a step.
        max_prefill_tokens: prefill slots of the largest bucket.
        max_model_len: longest sequence, tokens.
        max_lora_rank: largest rank of an adapter.
        adapters: where adapters are; None serves the base model only.
        attention_of: "local" or "distributed", for a sequence's KV pages that are not on the device.
        ledger: told what each step moves over the link.
        guard: asked before each step is packed, and when one fails: it may change who is served how.
        kernels: implementations to use; by default the best for the platform.
        kept: where compiled programs are looked for, and kept; by default nowhere.
        progress: told (programs compiled, programs in all) during warm-up.

    Attributes:
        on_step: told each plan before it is carried out, in the thread that steps; None by default. Steps follow one
            another where somebody is told, so that each can be looked at alone.
        meanwhile: called while the device works on a step; it may `begin` the next one.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        dtype: Any,
        memory: PageMemory,
        max_num_seqs: int,
        max_prefill_tokens: int,
        max_model_len: int,
        max_lora_rank: int,
        adapters: AdapterPool | None,
        attention_of: Callable[[PlannedSequence], str],
        ledger: Ledger,
        guard: NearDataGuard | None = None,
        kernels: Kernels | None = None,
        kept: KeptPrograms | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._adapters, self._dtype = adapters, np.dtype(dtype)
        self._memory, self._ledger, self._attention_of, self._guard = memory, ledger, attention_of, guard
        self.decoder = Decoder(config, num_shards=memory.num_shards)
        self._params = params
        self.param_specs = packed_specs(params, self.decoder.parallel)
        self._kept = kept or KeptPrograms(None, list(memory.mesh.devices.flat))
        self.kernels = kernels or choose_kernels(layout=memory.layout)
        stripes = adapters.num_stripes if adapters else 1
        self.shape = BatchShape(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            layout=memory.layout,
            max_rank=max_lora_rank if adapters else 0,
            stripes=stripes,
            pool_devices=memory.pool_devices,
            device_pages=memory.pool_pages,
            near=memory.near,
        )
        self.buckets = lattice(max_num_seqs, max_prefill_tokens)
        width = self.buckets[-1].decode_rows
        rank = -(-self.shape.max_rank // stripes)
        self.setting = StepSetting(memory.layout, rank, self.kernels, width, memory.near)
        self._width = max_num_seqs
        self._sent: dict[tuple[Bucket, str], tuple[Hashable, jax.Array]] = {}
        self._space = {False: device_sharding(memory.mesh), True: pool_sharding(memory.mesh)}
        self.on_step: Callable[[StepPlan], None] | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._under_way: _Flight | None = None
        self._begun: _Flight | None = None
        self._nothing_drawn = store_on_device(np.zeros(width, np.int32), memory.mesh)
        self.programs = self._compile_all(progress)

    @property
    def max_decode_rows(self) -> int:
        return self._width

    @property
    def max_prefill_tokens(self) -> int:
        return self.buckets[-1].prefill_tokens

    @property
    def prefill_block(self) -> int:
        return PREFILL_BLOCK

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """Runs one step, or ends the one that was begun of this plan.

        Args:
            plan: rows that fit the largest bucket; their adapters are acquired and their pages allocated.

        Returns:
            One result a row, in order.

        Raises:
            KvLostError: the step failed and took the KV pages of the device with it. Those are empty again; where it
                computed near the data, the next steps compute nothing there.
            Exception: the step failed for another reason, or twice.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun.plan is plan:
            bucket, built = begun.bucket, begun.built
        else:
            assert not plan.ahead, "a step that was planned ahead is executed only if it was begun"
            begun = None
            if self.on_step is not None:
                self.on_step(plan)
            bucket, built = self._pack(plan)
        try:
            return self._finish(begun or self._start(plan, bucket, built))
        except KvLostError:
            raise  # by `begin`
        except Exception as error:
            # What was begun goes down with the step before it.
            self._begun = None
            if not self._is_without(built, error):
                raise
            if plan.ahead:  # Some of its rows may have ended, so that it cannot be packed again.
                raise KvLostError("the step was begun before the end of the last one") from error
        return self._finish(self._start(plan, *self._pack(plan)))

    def begin(self, plan: StepPlan) -> bool:
        """Begins a step that was planned ahead, while the one before it is under way.

        Args:
            plan: made ahead.

        Returns:
            False where steps follow one another, or this one failed: it is planned again.

        Raises:
            KvLostError: as of `execute`.
        """
        before = self._under_way
        if self.on_step is not None or before is None:
            return False
        at = {row.sequence.seq_id: index for row, index in zip(before.plan.rows, before.built.sampled, strict=True)}
        bucket, built = self._pack(plan, at)
        try:
            self._begun = self._start(plan, bucket, built, drawn=before.result.sampled.token_ids)
        except Exception as error:
            logger.warning("a step was not begun ahead: %s: %s", type(error).__name__, error)
            self._is_without(built, error)
            return False
        return True

    def _is_without(self, built: BuiltStep, error: Exception) -> bool:
        """After a failed step: whether it computed near the data, and nothing does from here on.

        Raises:
            KvLostError: the KV pages of the device went down with it, and are empty.
        """
        without = self._guard is not None and self._guard.blame(built.use, error)
        if self._memory.kv_is_lost():
            self._memory.renew_kv()
            failure = None if without else error
            raise KvLostError("the step took the KV pages of the device with it", failure) from error
        return without

    def _pack(self, plan: StepPlan, drawn_at: Mapping[int, int] | None = None) -> tuple[Bucket, BuiltStep]:
        with annotate(annotations.PACK):
            if self._guard is not None:
                self._guard.check()
            bucket = pick_bucket(self.buckets, plan)
            return bucket, self.programs[bucket].builder.build(plan, placed=self._placed, drawn_at=drawn_at)

    def _start(self, plan: StepPlan, bucket: Bucket, built: BuiltStep, *, drawn: jax.Array | None = None) -> _Flight:
        program, memory = self.programs[bucket], self._memory
        with annotate(annotations.PACK):
            parcels = self.send(bucket, built)
        with annotate(annotations.DISPATCH):
            drawn = self._nothing_drawn if drawn is None else drawn
            memory.kv, result = program.run(self._params, memory.pool, memory.adapters, memory.kv, drawn, parcels)
            for crossing, size in program.traffic.of(built.use):
                self._ledger.add(crossing, moved_bytes=size.moved, useful_bytes=size.useful)
        return _Flight(plan, bucket, built, result)

    def _finish(self, flight: _Flight) -> list[RowResult]:
        self._under_way = flight
        try:
            self.meanwhile()
        finally:
            self._under_way = None
        with annotate(annotations.RESULTS):
            return self._unpack(flight)

    def send(self, bucket: Bucket, built: BuiltStep) -> dict[str, Any]:
        """The words of a step's parcels; those that did not change since they were last sent are there already."""
        program, words = self.programs[bucket], {}
        for name, parcel in built.parcels.items():
            kept = self._sent.get((bucket, name))
            if parcel.key is not None and kept is not None and kept[0] == parcel.key:
                words[name] = kept[1]
                continue
            packed = program.packing[name].pack(parcel.tree)
            if parcel.key is None:
                self._sent.pop((bucket, name), None)
                words[name] = packed
            else:
                place = store_in_pool if parcel.in_pool else store_on_device
                words[name] = place(packed, self._memory.mesh)
                self._sent[bucket, name] = parcel.key, words[name]
            if parcel.in_pool:
                size = self._memory.num_shards * packed.nbytes
                self._ledger.add(_control(name), moved_bytes=size, useful_bytes=size)
        return words

    def serve(self, params: Params) -> None:
        """Takes the parameters, before the first step.

        Args:
            params: as `pack_params` returns them, of the shapes that were told.
        """
        assert _shapes_of(params) == _shapes_of(self._params), (_shapes_of(params), _shapes_of(self._params))
        self._params = params

    def settle(self) -> threading.Thread:
        """Has the weights and then the pages move to huge pages beside what else goes on, with all programs loaded.

        The products of few rows take 5 to 10 % less time with weights there. What programs free is used again.

        Returns:
            The thread that does it.
        """
        memory = self._memory
        heap.keep_freed_memory()
        return huge_pages.settle(jax.tree.leaves(self._params), (memory.kv, memory.adapters, memory.pool))

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the base weights as they are kept, by name; those of layers by projection, all layers together."""
        flat = {**{name: w for name, w in self._params.items() if name != "layers"}, **self._params["layers"]}
        return {name: sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) for name, weight in flat.items()}

    def _unpack(self, flight: _Flight) -> list[RowResult]:
        built, result = flight.built, flight.result
        # The wide arrays stay on the device unless somebody asked for them.
        token_ids = np.asarray(result.sampled.token_ids).tolist()
        top = jax.device_get(result.sampled) if built.sampling.any_logprobs else None
        prompt = None if built.prompt_targets is None else jax.device_get(result.prompt)
        out = []
        for row, index, first in zip(flight.plan.rows, built.sampled, built.firsts, strict=True):
            token_id = token_ids[index] if index >= 0 else None
            if token_id == OVERFLOWED:
                out.append(RowResult(None, None, (), overflowed=str(self._dtype)))
                continue
            logprobs = None
            wanted = row.sequence.sampling.logprobs
            if token_id is not None and wanted is not None and top is not None:
                logprobs = _entry(token_id, top.logprobs[index], top.top_ids[index], top.top_logprobs[index], wanted)
            slot = first - flight.bucket.decode_rows
            scored = () if prompt is None else _prompt_entries(row, prompt, built.prompt_targets, slot)
            out.append(RowResult(token_id, logprobs, scored))
        return out

    def _placed(self, adapter_id: int) -> PlacedAdapter:
        assert self._adapters is not None, adapter_id
        return self._adapters.placed(adapter_id)

    def _compile_all(self, progress: Callable[[int, int], None] | None) -> dict[Bucket, Program]:
        programs: dict[Bucket, Program] = {}
        with ThreadPoolExecutor(min(len(self.buckets), os.cpu_count() or 1)) as threads:
            running = {}
            try:
                # The largest take longest to compile; the next is lowered meanwhile.
                for bucket in reversed(self.buckets):
                    program, args = self._described(bucket)
                    running[self._obtain(bucket, program, args, threads=threads)] = bucket, program
                for done in as_completed(running):
                    bucket, program = running[done]
                    programs[bucket] = program._replace(run=done.result())
                    if progress:
                        progress(len(programs), len(self.buckets))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return programs

    def _described(self, bucket: Bucket) -> tuple[Program, tuple[Any, ...]]:
        """A bucket's program but for what runs, and the shapes of its arguments."""
        builder = BatchBuilder(
            bucket, self.shape, lora_strategies=self._strategies(), attention_of=lambda seq: self._attention_of(seq)
        )
        empty = builder.build(StepPlan(()), placed=self._placed)
        packing = {name: PackedArrays(parcel.tree) for name, parcel in empty.parcels.items()}
        shard = self.decoder.parallel.shard_config
        traffic = StepTraffic(bucket, self.shape, config=shard, num_shards=self._memory.num_shards)
        return Program(builder, packing, traffic, None), self.abstract_args(empty, packing)

    def _strategies(self) -> tuple[str, ...]:
        served = (name for name, strategy in LORA.items() if self._memory.near or not strategy.computes_near)
        return tuple(served) if self._adapters else ()

    def _obtain(
        self, bucket: Bucket, program: Program, args: tuple[Any, ...], *, threads: ThreadPoolExecutor
    ) -> Future[Any]:
        """The compiled step of a bucket, soon: the one that was kept, or else one that is lowered before this returns.

        Whatever `_lower` reads has to be among the parts.
        """
        decoder, kernels = self.decoder, [[kernel.name for kernel in phase] for phase in self.kernels]
        sizes = decoder.config, decoder.parallel.num_shards, bucket, self.shape, self.setting.max_rank
        emulated = link.emulation() is not None
        parts = *sizes, self._strategies(), str(self._dtype), kernels, emulated, described(args)

        def load(path: Path) -> jax.stages.Compiled:
            found = self._kept.load(path)
            return self._kept.compile(self._lower(program.packing, args), *parts) if found is None else found

        path = self._kept.find(*parts)
        if path is not None:
            return threads.submit(load, path)
        return threads.submit(self._kept.compile, self._lower(program.packing, args), *parts)

    def _lower(self, packing: Mapping[str, PackedArrays], args: tuple[Any, ...]) -> jax.stages.Lowered:
        step = make_step(
            self.decoder,
            self._dtype,
            self._memory.mesh,
            setting=self.setting,
            packing=packing,
            param_specs=self.param_specs,
        )
        # float32 means float32: accelerators otherwise round the operands of a product to fewer bits.
        exact = self._dtype == np.float32
        with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
            return jax.jit(step, donate_argnums=3).lower(*args)

    def abstract_args(self, empty: BuiltStep, packing: Mapping[str, PackedArrays]) -> tuple[Any, ...]:
        """Shapes of a step's arguments with their shardings."""
        memory = self._memory

        def words(name: str) -> jax.ShapeDtypeStruct:
            sharding = self._space[empty.parcels[name].in_pool]
            return jax.ShapeDtypeStruct((max(packing[name].num_words, 1),), np.int32, sharding=sharding)

        def abstract(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        arrays = (self._params, memory.pool, memory.adapters, memory.kv, self._nothing_drawn)
        arrays = jax.tree.map(abstract, arrays)
        return *arrays, {name: words(name) for name in packing}


def _shapes_of(params: Params) -> Any:
    return jax.tree.map(lambda array: (array.shape, str(array.dtype)), params)


def _control(parcel: str) -> Crossing:
    """What the words of a parcel for the pool are counted as."""
    return Crossing("control", "attention" if parcel == "kv" else "lora", "to_pool", "step")


def _entry(token_id: int, logprob: Any, top_ids: np.ndarray, top_logprobs: np.ndarray, wanted: int) -> TokenLogprobs:
    top = tuple(zip(top_ids[:wanted].tolist(), top_logprobs[:wanted].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprob), top)


def _prompt_entries(row: Row, prompt: PromptLogprobs, targets: Any, slot: int) -> list[TokenLogprobs]:
    """Entries for the prompt tokens at positions start + 1 .. start + count."""
    wanted = row.sequence.sampling.prompt_logprobs
    if row.decode or wanted is None:
        return []
    count = min(row.count, len(row.sequence.prompt_ids) - row.start - 1)
    return [
        _entry(int(targets[i]), prompt.logprobs[i], prompt.top_ids[i], prompt.top_logprobs[i], wanted)
        for i in range(slot, slot + max(count, 0))
    ]
