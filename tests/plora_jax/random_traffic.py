"""Random users of a real engine whose adapters and answers are known, and checks that nothing leaks."""

from __future__ import annotations

import collections
import dataclasses
import random
import threading

import numpy as np
import pytest

from memory_pool.adapter_pool import CapacityError
from memory_pool.ledger import Crossing, LinkBytes
from plora_jax.adapters import AdapterError, load_adapter
from plora_jax.adapters.adapter import OUTSIDE
from plora_jax.engine import Generation, GenerationFailedError, OverloadedError, SamplingParams, UnknownAdapterError
from plora_jax.engine.traffic import LAYER_GROUPS
from strategies.strategy_table import LORA
from tests.plora_jax.conformance import PACK
from tests.plora_jax.scarce import make_adapter

MOST_TOKENS = 12
MAX_RANK = 32
PROMPTS = [np.random.default_rng(i).integers(3, 256, count).tolist() for i, count in enumerate((1, 4, 9, 23, 48))]
ALL_LINEAR = tuple(name for group in LAYER_GROUPS for name in group)
PATTERNS = [(4, ("q_proj", "v_proj")), (8, ("q_proj", "v_proj")), (16, ("o_proj",)), (32, ("q_proj",)), (2, ALL_LINEAR)]
CONTENTS = (*range(2 * len(PATTERNS)), "embed_head_lora")
"""What adapters hold: numbers are seeds of matrices made here, names are those of the pack."""

GROUP_OF = {name: group for group in LAYER_GROUPS for name in group}


def adapter_of(name, content, model):
    if isinstance(content, str):
        return load_adapter(
            PACK / "adapters" / content, name=name, config=model, max_lora_rank=MAX_RANK, dtype="float32"
        )
    rank, targets = PATTERNS[content % len(PATTERNS)]
    return make_adapter(name, seed=content, rank=rank, config=model, targets=targets, std=0.3)


def greedy(count, n=1):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, n=n)


class Shaky:
    """An executor that fails when told to, and counts on its own what adapters move."""

    def __init__(self, built):
        self._inner, self._adapters = built.executor, built.adapters
        self.known = {}
        self.useful = collections.Counter()
        self.fails = False
        self.failed_rows = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def execute(self, plan):
        if self.fails:
            self.fails = False
            self.failed_rows += len(plan.rows)
            raise RuntimeError("a step that was told to fail")
        tokens = collections.Counter()
        for row in plan.rows:
            if row.sequence.adapter_id:
                tokens["decode" if row.decode else "prefill", row.sequence.adapter_id] += row.count
        for (phase, adapter_id), count in tokens.items():
            self._count(phase, self._adapters.placed(adapter_id).strategy, self.known[adapter_id], count)
        return self._inner.execute(plan)

    def _count(self, phase, strategy, adapter, tokens):
        inside = {key: m for key, m in adapter.modules.items() if key.layer != OUTSIDE}
        inputs = {(key.layer, GROUP_OF[key.projection]): m.a.shape[1] for key, m in inside.items()}
        sums = np.sum([(m.a.size + m.b.size, m.b.shape[0], m.rank) for m in inside.values()] or [(0, 0, 0)], axis=0)
        numbers, outputs, ranks = sums.tolist()
        if strategy == "fetch":
            self.useful["adapter", strategy, "to_device", phase] += numbers * 4
        if strategy in ("near_data", "split"):
            self.useful["activation", strategy, "to_pool", phase] += tokens * sum(inputs.values()) * 4
            back = outputs if strategy == "near_data" else ranks
            self.useful["activation", strategy, "to_device", phase] += tokens * back * 4


class Free:
    """What is free of everything that can be taken."""

    def __init__(self, built):
        self._built = built
        self.start = self.now()

    def now(self):
        b = self._built
        return b.kv._pool.num_free, b.adapters._device.num_free, b.kv._device.num_free, b.kv.num_copies

    def check_integrity(self):
        self._built.adapters.check_integrity()
        self._built.kv.check_integrity()
        self._built.kv._pool.check_integrity()
        held = self._built.adapters._writer.held + self._built.kv.num_held_pages
        assert self._built.kv._pool.num_usable - self._built.kv._pool.num_free == held


@dataclasses.dataclass
class Asked:
    """A request for `count` tokens on a prompt, of an adapter with this content."""

    generation: Generation
    content: int | str | None
    prompt: int
    count: int
    cancelled: bool = False


class Traffic:
    """Random users of one engine, on one thread."""

    def __init__(self, built, answers, *, seed, preferred):
        self.built, self.engine, self.answers = built, built.engine, answers
        self.random = random.Random(seed)
        self.free = Free(built)
        self.executor = self.engine._loop._executor = Shaky(built)
        built.adapters._preferred = preferred
        self.before, self.fallbacks = built.ledger.totals(), built.adapters.fallbacks
        self.names = {}
        self.live = []
        self.seen = collections.Counter()
        self.actions = {
            self.submit: 60,
            self.load: 10,
            self.reload: 3,
            self.unload: 3,
            self.cancel: 5,
            self.load_bad: 2,
            self.fail_a_step: 1,
            self.nothing: 10,
        }

    def run(self, steps):
        for _ in range(steps):
            (action,) = self.random.choices(list(self.actions), list(self.actions.values()))
            action()
            self.check()
            self.engine.step()
            self.check()
            self.take_finished()

    def check(self):
        self.engine.check_integrity()
        self.free.check_integrity()

    def nothing(self):
        pass

    def submit(self):
        name = self.random.choice([None, *self.names, *self.names, "unknown"])
        prompt, count = self.random.randrange(len(PROMPTS)), self.random.randint(1, MOST_TOKENS)
        sampling = greedy(count, n=self.random.choice((1, 1, 1, 2, 3)))
        try:
            generation = self.engine.submit(
                PROMPTS[prompt], sampling, adapter=name, priority=self.random.choice((0, 0, 0, -1, 1))
            )
        except UnknownAdapterError:
            assert name == "unknown"
        except OverloadedError:
            self.seen["overloaded"] += 1
        else:
            self.live.append(Asked(generation, self.names.get(name), prompt, count))

    def load(self, name=None):
        content = self.random.choice(CONTENTS)
        name = name or f"n{self.random.randrange(8)}"
        inplace, before = name in self.names, (self.free.now(), self.engine.adapters())
        adapter = adapter_of(name, content, self.built.model)
        self.executor.known[adapter.identity] = adapter
        try:
            self.engine.add_adapter(adapter, load_inplace=inplace)
        except CapacityError:
            assert (self.free.now(), self.engine.adapters()) == before
            self.seen["refused"] += 1
        else:
            self.seen["reloaded" if inplace else "loaded"] += 1
            self.names[name] = content

    def reload(self):
        if self.names:
            self.load(self.random.choice(list(self.names)))

    def unload(self):
        if self.names:
            name = self.random.choice(list(self.names))
            self.engine.unload_adapter(name)
            del self.names[name]

    def cancel(self):
        if self.live:
            asked = self.random.choice(self.live)
            asked.cancelled = True
            asked.generation.cancel()

    def load_bad(self):
        before = self.free.now(), self.engine.adapters()
        with pytest.raises(CapacityError, match=f"this server holds rank <= {MAX_RANK}"):
            self.engine.add_adapter(make_adapter("bad", seed=0, rank=MAX_RANK + 1, config=self.built.model))
        with pytest.raises(AdapterError, match="DoRA"):
            self.engine.load_adapter("bad", str(PACK / "adapters" / "dora"))
        assert (self.free.now(), self.engine.adapters()) == before

    def fail_a_step(self):
        self.executor.fails = True

    def take_finished(self):
        for asked in [asked for asked in self.live if asked.generation.finished]:
            self.live.remove(asked)
            self.check_answer(asked)

    def check_answer(self, asked):
        wanted = self.answers[asked.content, asked.prompt]
        try:
            completions = asked.generation.collect()
        except GenerationFailedError:
            self.seen["failed"] += 1
            assert self.seen["failed"] <= self.executor.failed_rows
            return
        for completion in completions:
            tokens, reason = completion.token_ids, completion.finish_reason
            assert tokens == wanted[: len(tokens)], asked
            assert reason == "length" or asked.cancelled, asked
            assert reason != "length" or len(tokens) == asked.count, asked
            self.seen[reason] += 1

    def finish(self):
        """Serves what is left; afterwards everything is free again, and all link bytes of adapters are counted."""
        self.executor.fails = False
        while self.live:
            self.engine.step()
            self.check()
            self.take_finished()
        for name in list(self.names):
            self.engine.unload_adapter(name)
        self.check()
        assert self.free.now() == self.free.start
        assert self.built.adapters._entries == {}
        for strategy in LORA:
            for phase in ("decode", "prefill"):
                self._check_ledger(strategy, phase)

    def _check_ledger(self, strategy, phase):
        now, nothing = self.built.ledger.totals(), LinkBytes(0, 0)
        for item, direction in (("adapter", "to_device"), ("activation", "to_pool"), ("activation", "to_device")):
            key = Crossing(item, strategy, direction, phase)
            counted = now.get(key, nothing).useful - self.before.get(key, nothing).useful
            assert counted == self.executor.useful[key], key


class Threads:
    """Users of a running engine, each in a thread of its own; what goes wrong in one is raised by `join`."""

    def __init__(self, built, answers):
        self.engine, self.model, self.answers = built.engine, built.model, answers
        self.errors, self.threads = [], []
        self.served = self.refused = 0

    def start(self, user, *args):
        def run():
            try:
                user(*args)
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self):
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def load_and_unload(self, name, content, rounds):
        """One owner of a name, which always stands for the same content: loads it, again in place, takes it away."""
        for index in range(rounds):
            try:
                self.engine.add_adapter(adapter_of(name, content, self.model), load_inplace=index % 3 > 0)
            except CapacityError:
                self.refused += 1
            if index % 3 == 2 and name in {status.name for status in self.engine.adapters()}:
                self.engine.unload_adapter(name)

    def stream(self, names, seed, rounds):
        rng = random.Random(seed)
        for _ in range(rounds):
            name, prompt, count = rng.choice([None, *names]), rng.randrange(len(PROMPTS)), rng.randint(1, MOST_TOKENS)
            try:
                generation = self.engine.submit(PROMPTS[prompt], greedy(count), adapter=name)
            except (UnknownAdapterError, OverloadedError):
                continue
            if rng.random() < 0.2:
                generation.cancel()
            completion = generation.collect()[0]
            wanted = self.answers[names.get(name), prompt]
            assert completion.token_ids == wanted[: len(completion.token_ids)], (name, prompt)
            self.served += completion.finish_reason == "length"
