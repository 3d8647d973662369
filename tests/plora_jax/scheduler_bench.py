"""A scheduler over fakes, and the sequences that it serves."""

from plora_jax.engine import SamplingParams, Scheduler, Sequence
from tests.plora_jax.engine_fakes import FakeExecutor, FakeStore, hashed_token, make_config, make_kv


class Bench:
    """A scheduler that steps over fakes until sequences have their tokens."""

    def __init__(
        self,
        *,
        pool_pages: int = 32,
        device_pages: int | None = None,
        pool_devices: int = 1,
        keep_copies: int | None = None,
        room: int = 100,
        sizes: dict[int, int] | None = None,
        **limits: int | None,
    ) -> None:
        self.config, self.store = make_config(**limits), FakeStore(room, sizes)
        self.store.kept.update(range(1, 100))
        self.executor = FakeExecutor(self.config)
        self.kv = make_kv(
            self.executor,
            page_tokens=self.config.page_tokens,
            pool_pages=pool_pages,
            device_pages=device_pages,
            pool_devices=pool_devices,
            keep_copies=keep_copies,
        )
        self.scheduler = Scheduler(self.config, self.kv.kv, self.store)
        self.finished: list[int] = []

    def add(self, seq_id: int, prompt: int, output: int, *, adapter_id: int = 0, priority: int = 0) -> Sequence:
        seq = make_sequence(seq_id, prompt, output, adapter_id=adapter_id, priority=priority)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[tuple[int, int, bool]]:
        """Runs a step; returns (seq_id, count, decode) of its rows."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        for row, _ in self.scheduler.complete(plan, self.executor.execute(plan)):
            seq = row.sequence
            if len(seq.output_ids) == seq.sampling.max_tokens:
                self.finished.append(seq.seq_id)
                self.scheduler.remove(seq.seq_id)
        self.scheduler.check_integrity()
        held = {seq.adapter_id for seq in self.scheduler.running} - {0}
        assert set(+self.store.references) == held
        return [(row.sequence.seq_id, row.count, row.decode) for row in plan.rows]

    def run(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"still {self.scheduler.stats()} after {most_steps} steps")


def make_sequence(seq_id: int, prompt: int, output: int, *, adapter_id: int = 0, priority: int = 0) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        prompt_ids=[(seq_id + i) % 90 for i in range(prompt)],
        sampling=SamplingParams(max_tokens=output),
        seed=seq_id,
        adapter_id=adapter_id,
        arrival_s=float(seq_id),
        priority=priority,
    )


def solo_output(seq_id: int, prompt: int, output: int, *, adapter_id: int = 0) -> list[int]:
    """What a sequence generates when it is alone."""
    seq = make_sequence(seq_id, prompt, output, adapter_id=adapter_id)
    while len(seq.output_ids) < output:
        seq.output_ids.append(hashed_token(seq))
    return seq.output_ids
