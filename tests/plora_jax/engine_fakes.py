"""Stand-ins for what the engine is given: an executor without a model, a store without matrices, a clock to set."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import threading
import zlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from memory_pool.kv_pool import ABSENT, HomePages, KvPool
from memory_pool.ledger import Ledger
from memory_pool.pages import PageAllocator
from memory_pool.pool_pages import PoolPages
from plora_jax.adapters.adapter import Adapter
from plora_jax.engine import Engine, SchedulerConfig, Sequence, TokenLogprobs
from plora_jax.engine.plan import Row, RowResult, StepPlan
from plora_jax.tokenizer import load_tokenizer

VOCAB = 100
EOS = 2
TOKENIZER = load_tokenizer(pathlib.Path(__file__).parents[1] / "data" / "conformance" / "models" / "llama")
"""Maps id i to the character U+4E00 + i."""


def text_of(*token_ids: int) -> str:
    return "".join(chr(0x4E00 + token_id) for token_id in token_ids)


class FakeClock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def hashed_token(seq: Sequence) -> int:
    """A token in [10, VOCAB) that depends on seed, adapter and every token before it."""
    known = bytes(str((seq.seed, seq.adapter_id, seq.prompt_ids, seq.output_ids)), "ascii")
    return 10 + zlib.crc32(known) % (VOCAB - 10)


Page = list[int | None]
"""What stands for the keys and values of each token of a page; None where none were written."""

TOKEN_BYTES = 10


class FakeMemory:
    """Pool and device memory; `saves` and `loads` list the number of pages of each copy."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.pool: dict[int, Page] = {}
        self.device: dict[int, Page] = {}
        self.saves: list[int] = []
        self.loads: list[int] = []
        self.fail_with: Exception | None = None

    def save_kv(self, pool_ids: SequenceOf[int], device_ids: SequenceOf[int]) -> int:
        self.saves.append(len(pool_ids))
        return self._copy(self.device, device_ids, self.pool, pool_ids)

    def load_kv(self, device_ids: SequenceOf[int], pool_ids: SequenceOf[int]) -> int:
        self.loads.append(len(pool_ids))
        return self._copy(self.pool, pool_ids, self.device, device_ids)

    def write(self, device_page: int, offset: int, value: int) -> None:
        assert device_page > 0, "a token was written to a reserved or absent page"
        self.device.setdefault(device_page, [None] * self._page_tokens)[offset] = value

    def read(self, device_page: int, pool_page: int, offset: int) -> int | None:
        assert (device_page == ABSENT) != (pool_page == ABSENT), "a page is in exactly one of the tables"
        return (self.pool[pool_page] if device_page == ABSENT else self.device[device_page])[offset]

    def _copy(
        self, source: dict[int, Page], source_ids: SequenceOf[int], to: dict[int, Page], ids: SequenceOf[int]
    ) -> int:
        if self.fail_with is not None:
            raise self.fail_with
        assert len(source_ids) == len(ids) == len(set(ids))
        assert min(*ids, *source_ids) > 0
        to.update({into: list(source[page]) for into, page in zip(ids, source_ids, strict=True)})
        return len(ids) * self._page_tokens * TOKEN_BYTES


class FakeExecutor:
    """Keeps hashes of token prefixes as keys and values, and checks that each row finds those of its own past.

    Args:
        config: whose limits a plan must keep.
        draw: the next token of a sequence.
    """

    def __init__(self, config: SchedulerConfig, draw: Callable[[Sequence], int] = hashed_token) -> None:
        self._config, self.draw = config, draw
        self.memory = FakeMemory(config.page_tokens)
        self.plans: list[StepPlan] = []
        self._begun: StepPlan | None = None
        self.fail_with: Exception | None = None
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.meanwhile: Callable[[], None] = lambda: None
        self.max_decode_rows = config.max_num_seqs
        self.max_prefill_tokens = config.max_prefill_tokens
        self.prefill_block = config.prefill_block

    def begin(self, plan: StepPlan) -> bool:
        assert plan.ahead
        assert self._begun is None, "one step is begun already"
        assert self.plans, "no step is under way"
        drawing = {row.sequence.seq_id: row for row in self.plans[-1].rows if row.samples}
        for row in plan.rows:
            before = drawing[row.sequence.seq_id]
            assert row.start == before.start + before.count
            assert row.sequence.kv is not None
            page = row.sequence.kv.device_table()[row.start // self._config.page_tokens]
            assert page != ABSENT, "a step that was begun writes to a page that is not there"
        self._begun = plan
        return True

    def execute(self, plan: StepPlan) -> list[RowResult]:
        assert plan.ahead == (self._begun is plan)
        self._begun = None
        self.before_step(plan)
        if self.fail_with is not None:
            raise self.fail_with
        self._check_limits(plan)
        self.plans.append(plan)
        self.meanwhile()
        return [self._run(row) for row in plan.rows]

    def _check_limits(self, plan: StepPlan) -> None:
        kinds = [row.decode for row in plan.rows]
        assert kinds == sorted(kinds, reverse=True), "decode rows come first"
        assert len({row.sequence.seq_id for row in plan.rows}) == len(plan.rows)
        assert len(plan.rows) <= self.max_decode_rows
        assert sum(row.count for row in plan.rows) <= self._config.max_num_batched_tokens
        slots = sum(-(-row.count // self.prefill_block) * self.prefill_block for row in plan.rows if not row.decode)
        assert slots <= self.max_prefill_tokens

    def _run(self, row: Row) -> RowResult:
        seq, size = row.sequence, self._config.page_tokens
        if seq.kv is None:  # It ended with the step before, which was under way when this one was begun.
            return RowResult(VOCAB, None, ())
        assert row.start == seq.computed
        assert row.count >= 1
        assert seq.kv is not None
        most = seq.num_tokens + 1  # The step after this one may have been planned.
        assert len(seq.kv.device_table()) == len(seq.kv.pool_table()) <= -(-most // size)
        assert row.decode == (bool(seq.output_ids) and row.start == seq.num_tokens - 1)
        assert row.samples == (row.start + row.count == seq.num_tokens)
        device, pool = seq.kv.device_table().tolist(), seq.kv.pool_table().tolist()
        value = seq.adapter_id
        for position in range(row.start + row.count):
            value = zlib.crc32(bytes(str(seq.token(position)), "ascii"), value)
            page, offset = divmod(position, size)
            if position >= row.start:
                self.memory.write(device[page], offset, value)
            assert self.memory.read(device[page], pool[page], offset) == value, f"wrong KV at position {position}"
        wants_prompt = seq.sampling.prompt_logprobs is not None and not row.decode
        last = min(row.start + row.count, len(seq.prompt_ids) - 1) if wants_prompt else row.start
        scored = tuple(self._entry(seq.prompt_ids[p]) for p in range(row.start + 1, last + 1))
        if not row.samples:
            return RowResult(None, None, scored)
        token = self.draw(seq)
        return RowResult(token, None if seq.sampling.logprobs is None else self._entry(token), scored)

    def _entry(self, token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -float(token_id), ((token_id, -float(token_id)),))


@dataclasses.dataclass(frozen=True)
class FakePlacement:
    tier: str
    references: int
    strategy: str = "resident"
    pool_bytes: int = 1000
    device_bytes: int = 0
    pinned: bool = False
    moving: str = ""
    missing_bytes: int = 0


class FakeStore:
    """Room for adapters of these sizes, 1 unless said; no room refuses all."""

    def __init__(self, room: int, sizes: dict[int, int] | None = None) -> None:
        self.room, self.sizes = room, sizes or {}
        self.references: collections.Counter[int] = collections.Counter()
        self.kept: set[int] = set()
        self.pinned: set[int] = set()
        self.chunks = 1
        self.written_by: list[str] = []
        self.between_steps: Callable[[Callable[[], None]], None] = lambda function: function()

    def put(self, adapter: Adapter, /, *, pinned: bool = False) -> None:
        for _ in range(self.chunks):
            self.between_steps(lambda: self.written_by.append(threading.current_thread().name))
        self.kept.add(adapter.identity)
        if pinned:
            self.pinned.add(adapter.identity)

    def can_acquire(self, adapter_id: int) -> bool:
        taken = sum(self.sizes.get(held, 1) for held in +self.references)
        return self.references[adapter_id] > 0 or taken + self.sizes.get(adapter_id, 1) <= self.room

    def acquire(self, adapter_id: int) -> None:
        assert self.can_acquire(adapter_id)
        assert adapter_id in self.kept
        self.references[adapter_id] += 1

    def release(self, adapter_id: int) -> None:
        assert self.references[adapter_id] > 0
        self.references[adapter_id] -= 1

    def retire(self, adapter_id: int) -> None:
        assert not self.references[adapter_id]
        self.kept.remove(adapter_id)

    def status(self, adapter_id: int) -> FakePlacement:
        if adapter_id not in self.kept:
            raise KeyError(adapter_id)
        held = self.references[adapter_id]
        return FakePlacement("device" if held else "pool", held, pinned=adapter_id in self.pinned)


def make_config(**changes: int | None) -> SchedulerConfig:
    """Limits small enough that a test meets them: 4 sequences, 16 tokens a step, pages of 4, context 32."""
    limits: dict[str, int | None] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_prefill_tokens": 16,
        "prefill_block": 4,
        "page_tokens": 4,
        "max_model_len": 32,
        "max_waiting": 64,
    }
    return SchedulerConfig(**(limits | changes))  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass
class FakeKv:
    """KV pages over the memory of a fake executor."""

    kv: KvPool
    pool: HomePages
    device: PageAllocator
    ledger: Ledger

    def check_all_given_back(self) -> None:
        self.kv.check_integrity()
        assert self.kv.num_held_pages == 0
        assert self.device.num_free == self.device.num_usable


def make_kv(
    executor: FakeExecutor,
    *,
    page_tokens: int,
    pool_pages: int,
    device_pages: int | None = None,
    pool_devices: int = 1,
    keep_copies: int | None = None,
) -> FakeKv:
    """Pages that can be given out: of all pool devices, and of the device, by default as many."""
    pool = PoolPages(pool_devices, -(-pool_pages // pool_devices) + 1)
    device, ledger = PageAllocator((device_pages or pool_pages) + 1), Ledger()
    kv = KvPool(
        pool,
        device,
        executor.memory,
        page_tokens=page_tokens,
        token_bytes=TOKEN_BYTES,
        keep_copies=keep_copies,
        ledger=ledger,
    )
    return FakeKv(kv, pool, device, ledger)


@dataclasses.dataclass
class Rig:
    """An engine and everything behind it."""

    engine: Engine
    executor: FakeExecutor
    store: FakeStore
    kv: FakeKv
    clock: FakeClock

    def load(self, name: str) -> int:
        """Loads an adapter; returns its identity."""
        before = set(self.store.kept)
        self.engine.load_adapter(name, f"/adapters/{name}")
        (adapter_id,) = self.store.kept - before
        return adapter_id

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine.check_integrity()

    def check_all_given_back(self) -> None:
        self.engine.check_integrity()
        self.kv.check_all_given_back()
        assert not +self.store.references
        assert all(status.in_flight == 0 for status in self.engine.adapters())


def make_rig(
    *,
    pool_pages: int = 32,
    device_pages: int | None = None,
    keep_copies: int | None = None,
    room: int = 2,
    draw: Callable[[Sequence], int] = hashed_token,
    load_adapter: Callable[[str, str], Adapter] | None = None,
    decode_rows: int | None = None,
    enable_lora: bool = True,
    **limits: int | None,
) -> Rig:
    """An engine over fakes; `limits` as for `make_config`."""
    config, clock, store = make_config(**limits), FakeClock(), FakeStore(room)
    executor = FakeExecutor(config, draw)
    executor.max_decode_rows = decode_rows or config.max_num_seqs
    kv = make_kv(
        executor,
        page_tokens=config.page_tokens,
        pool_pages=pool_pages,
        device_pages=device_pages,
        keep_copies=keep_copies,
    )
    engine = Engine(
        executor=executor,
        scheduler_config=config,
        kv=kv.kv,
        tokenizer=TOKENIZER,
        adapters=store if enable_lora else None,
        load_adapter=load_adapter or (lambda name, path: Adapter(name, {}, {}, path)),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        model_name="base",
        clock=clock,
    )
    return Rig(engine, executor, store, kv, clock)
