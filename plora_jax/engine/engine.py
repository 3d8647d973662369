"""The engine as its users see it: requests in from any thread, pieces of completions out.

    engine.start()
    generation = engine.submit(prompt_ids, SamplingParams(max_tokens=64), adapter="pirate")
    for delta in generation: print(delta.text, end="")

Requests are checked here and become sequences; the loop (`plora_jax.engine.loop`) does the rest.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from memory_pool.kv_pool import KvPool
from plora_jax.adapters.adapter import Adapter
from plora_jax.engine.adapter_table import AdapterStatus, AdapterTable
from plora_jax.engine.budget import SchedulerConfig
from plora_jax.engine.clock import Clock, SystemClock
from plora_jax.engine.errors import NoPlanError, OverloadedError
from plora_jax.engine.generation import Generation
from plora_jax.engine.loop import EngineLoop, Live
from plora_jax.engine.outputs import Completion
from plora_jax.engine.params import RequestError, SamplingParams
from plora_jax.engine.placement import PlacementPlanner, PlanExplanation, Reasons
from plora_jax.engine.plan import Executor
from plora_jax.engine.requests import make_sequence, resolve_request
from plora_jax.engine.residency import AdapterStorage, NoAdapters
from plora_jax.engine.scheduler import Scheduler
from plora_jax.engine.stats import EngineStats, Observations, Recorder
from plora_jax.engine.stream import TokenStream
from plora_jax.tokenizer import Detokenizer, StopChecker, Tokenizer


class Engine:
    """Serves one base model and its adapters.

    Args:
        executor: carries out steps.
        scheduler_config: limits; also the longest sequence.
        kv: KV pages of the executor's memory, in the pool and on the device.
        tokenizer: of the base model.
        adapters: keeps the adapters; None serves the base model only.
        load_adapter: reads and checks an adapter: (name, path) to Adapter. Runs in the thread that asks.
        vocab_size: V.
        eos_token_ids: tokens that end a completion.
        model_name: name of the base model; no adapter may take it.
        clock: where times come from; the machine's by default.
        seed: of the random draws of requests that bring no seed.
        planner: who is served how; None where that is fixed.

    Raises:
        ValueError: the limits contradict each other, the KV pages or the executor.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler_config: SchedulerConfig,
        kv: KvPool,
        tokenizer: Tokenizer,
        adapters: AdapterStorage | None,
        load_adapter: Callable[[str, str], Adapter],
        vocab_size: int,
        eos_token_ids: SequenceOf[int],
        model_name: str,
        clock: Clock | None = None,
        seed: int = 0,
        planner: PlacementPlanner | None = None,
    ) -> None:
        if executor.max_decode_rows < scheduler_config.max_num_seqs:
            raise ValueError(
                f"max_num_seqs {scheduler_config.max_num_seqs} is above the {executor.max_decode_rows} decode rows of "
                "the executor's largest bucket: lower --max_num_seqs"
            )
        self.tokenizer, self.model_name, self.vocab_size = tokenizer, model_name, vocab_size
        self.scheduler_config, self.eos_token_ids = scheduler_config, tuple(eos_token_ids)
        self.clock = clock or SystemClock()
        store = adapters or NoAdapters()
        self._read_adapter = load_adapter
        self._scheduler = Scheduler(scheduler_config, kv, store)
        self._recorder = Recorder()
        self._planner = planner
        self._loop = EngineLoop(
            executor,
            self._scheduler,
            recorder=self._recorder,
            clock=self.clock,
            release=self._release_adapter,
            planner=planner,
        )
        store.between_steps = self._loop.run_between_steps
        self._table = AdapterTable(
            store, base_name=model_name, clock=self.clock, post=self._loop.post, reasons=self._reasons
        )
        self._random = random.Random(seed)
        self._seq_ids = itertools.count(1)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, tokens."""
        return self.scheduler_config.max_model_len

    @property
    def healthy(self) -> bool:
        """Whether requests can be served: the engine is not dead and not shut down."""
        return self._loop.healthy

    def start(self) -> None:
        """Steps in a background thread from now on. Without it, whoever waits for a generation steps."""
        self._loop.start()

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets the others run on, then cancels what is left and ends the thread.

        Args:
            drain_s: how long the others may run on, seconds.
        """
        self._loop.shutdown(drain_s)

    def submit(
        self, prompt_ids: SequenceOf[int], sampling: SamplingParams, *, adapter: str | None = None, priority: int = 0
    ) -> Generation:
        """Takes a request in. Any thread; returns at once.

        Args:
            prompt_ids: tokens of the prompt, at least one.
            sampling: options.
            adapter: name of a loaded adapter; None or the base model's name for the base model.
            priority: smaller runs first.

        Raises:
            RequestError: a field is out of range, or prompt and max_tokens exceed the context.
            UnknownAdapterError: no such adapter.
            OverloadedError: as many sequences are in flight as may run and wait.
            EngineDeadError: the engine is shutting down or dead.
        """
        config = self.scheduler_config
        sampling = resolve_request(prompt_ids, sampling, vocab_size=self.vocab_size, max_model_len=config.max_model_len)
        most = config.max_num_seqs + config.max_waiting
        if sampling.n > most:
            raise RequestError(
                f"n must be at most {most}, as many as this server holds at once, got {sampling.n}.", "n"
            )
        decoders = [
            Detokenizer(self.tokenizer, prompt_ids, skip_special_tokens=sampling.skip_special_tokens)
            for _ in range(sampling.n)
        ]

        def make() -> list[Live]:
            return self._make_live(prompt_ids, sampling, decoders=decoders, adapter=adapter, priority=priority)

        return self._loop.enter(sampling.n, make)[0].generation

    def generate(
        self,
        prompts: SequenceOf[str | SequenceOf[int]],
        sampling: SamplingParams | SequenceOf[SamplingParams],
        *,
        adapters: SequenceOf[str | None] | str | None = None,
    ) -> list[list[Completion]]:
        """Serves a list of prompts and waits for all, with or without the background thread.

        Args:
            prompts: texts or token ids.
            sampling: options for all, or one a prompt.
            adapters: adapter for all, or one a prompt.

        Returns:
            The completions of each prompt, in the order of the prompts.

        Raises:
            GenerationFailedError: a completion ended with an error.
            RequestError, UnknownAdapterError, EngineDeadError: as `submit`; what was submitted before is cancelled.
        """
        options = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        names = [adapters] * len(prompts) if adapters is None or isinstance(adapters, str) else adapters
        waiting: collections.deque[Generation] = collections.deque()
        completions: list[list[Completion]] = []
        try:
            for prompt, of_one, name in zip(prompts, options, names, strict=True):
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                while (generation := self._try_submit(ids, of_one, name, last_try=not waiting)) is None:
                    completions.append(waiting.popleft().collect())
                waiting.append(generation)
            while waiting:
                completions.append(waiting.popleft().collect())
        finally:
            for generation in waiting:
                generation.cancel()
        return completions

    def load_adapter(self, name: str, path: str, *, load_inplace: bool = False, pinned: bool = False) -> AdapterStatus:
        """Reads an adapter from disk and serves it under a name. Running streams go on meanwhile.

        Args:
            name: for clients.
            path: where the `load_adapter` given to the constructor finds it.
            load_inplace: the name may be taken; requests in flight then end with the old load.
            pinned: once it is on the device it does not leave for another adapter; a planner serves it from there
                as far as device memory goes.

        Raises:
            AdapterExistsError: the name is taken or being loaded.
            AdapterError, FileNotFoundError, ...: whatever reading or storing it raises; the name stays as it was.
        """
        return self._table.load(name, lambda: self._read_adapter(name, path), inplace=load_inplace, pinned=pinned)

    def add_adapter(self, adapter: Adapter, *, load_inplace: bool = False, pinned: bool = False) -> AdapterStatus:
        """Serves an adapter that is in memory, under its own name; else as `load_adapter`."""
        return self._table.load(adapter.name, lambda: adapter, inplace=load_inplace, pinned=pinned)

    def unload_adapter(self, name: str) -> None:
        """Takes an adapter's name away at once; its memory is freed when the last request that uses it ends.

        Raises:
            UnknownAdapterError: no such adapter.
        """
        self._table.unload(name)

    def adapters(self) -> list[AdapterStatus]:
        """All adapters that requests may name, in the order of their names. Any thread."""
        return self._table.statuses()

    def explain_adapter(self, name: str) -> PlanExplanation:
        """Why an adapter is served as it is: every strategy, and what it would change. Any thread.

        Raises:
            UnknownAdapterError: no such adapter.
            NoPlanError: strategies are forced, or no plan has been made since the adapter came.
        """
        adapter_id, reasons = self._table.id_of(name), self._reasons()
        found = None if reasons is None else reasons.long(adapter_id, name)
        if found is not None:
            return found
        if self._planner is None or not self._planner.plans_adapters:
            raise NoPlanError("no plan: adapters are served by the strategy of --lora_strategy; start with auto")
        raise NoPlanError(f"no plan has been made since adapter {name!r} was loaded: plans are made while requests run")

    def use_planner(self, planner: PlacementPlanner | None) -> None:
        """Has another planner from the next step on, or none, and ends the one before. Any thread."""

        def take() -> None:
            if self._planner is not None:
                self._planner.close()
            self._planner = self._loop.planner = planner

        self._loop.run_between_steps(take)

    def stats(self) -> EngineStats:
        """Counters and gauges of now. Any thread."""
        scheduler = self._scheduler.stats()
        prompt_tokens, generation_tokens, finished, overflowed = self._recorder.counters()
        in_step = self._scheduler.running
        waits = [seq for seq in self._loop.sequences() if seq not in in_step]
        running, waiting = (
            tuple(sorted({name for seq in queue if (name := self._table.name_of(seq.adapter_id))}))
            for queue in (in_step, waits)
        )
        return EngineStats(
            running=scheduler.running,
            waiting=max(0, self._loop.num_live - scheduler.running),
            kv_usage=scheduler.kv_usage,
            preemptions=scheduler.preemptions,
            suspensions=scheduler.suspensions,
            restores=scheduler.restores,
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
            finished=finished,
            overflowed=overflowed,
            steps=self._recorder.steps,
            steps_ahead=self._recorder.steps_ahead,
            running_adapters=running,
            waiting_adapters=waiting,
        )

    def take_observations(self) -> Observations:
        """Latencies and lengths measured since the last call. Any thread."""
        return self._recorder.take()

    def step(self) -> bool:
        """Runs one step; only without the background thread. Returns whether anything ran."""
        return self._loop.step()

    def check_integrity(self) -> None:
        """Raises AssertionError unless everything held is held by a request in flight. Between steps only."""
        self._loop.check_integrity()

    def _make_live(
        self,
        prompt_ids: SequenceOf[int],
        sampling: SamplingParams,
        *,
        decoders: SequenceOf[Detokenizer],
        adapter: str | None,
        priority: int,
    ) -> list[Live]:
        """The n completions of a request that is taken in; one caller at a time."""
        adapter_id = self._table.use(adapter, sampling.n)
        first_seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        sequences = [
            make_sequence(
                next(self._seq_ids),
                prompt_ids,
                sampling,
                seed=first_seed + index,
                eos_token_ids=self.eos_token_ids,
                adapter_id=adapter_id,
                arrival_s=self.clock.now(),
                priority=priority,
            )
            for index in range(sampling.n)
        ]
        generation = Generation(
            f"request-{sequences[0].seq_id}",
            sampling.n,
            prompt_tokens=len(prompt_ids),
            adapter=adapter if adapter_id else None,
            arrival_s=sequences[0].arrival_s,
            cancel=self._loop.cancel,
            drive=self._loop.drive,
        )
        eos = frozenset(self.eos_token_ids)
        stops = [StopChecker(sampling.stop, sampling.include_stop_str_in_output) for _ in sequences]
        streams = [
            TokenStream(index, seq, eos_token_ids=eos, decoder=decoder, stops=checker)
            for index, (seq, decoder, checker) in enumerate(zip(sequences, decoders, stops, strict=True))
        ]
        return [Live(generation, stream) for stream in streams]

    def _try_submit(
        self, prompt_ids: SequenceOf[int], sampling: SamplingParams, adapter: str | None, *, last_try: bool
    ) -> Generation | None:
        try:
            return self.submit(prompt_ids, sampling, adapter=adapter)
        except OverloadedError:
            if last_try:
                raise
            return None

    def _reasons(self) -> Reasons | None:
        return None if self._planner is None else self._planner.reasons()

    def _release_adapter(self, adapter_id: int) -> None:
        self._table.release(adapter_id)
