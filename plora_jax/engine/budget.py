"""How much one step may hold, and how much of it is still free while the step is planned."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        max_num_seqs: sequences that run at once; at most the executor's max_decode_rows.
        max_num_batched_tokens: decode rows and prefill tokens of one step.
        max_prefill_tokens: prefill token slots of one step (the executor's largest bucket).
        prefill_block: slots are taken in whole blocks: a chunk of n tokens takes ceil(n / block) * block.
        page_tokens: G, tokens of a KV page.
        max_model_len: longest sequence, prompt and output together, tokens.
        prefill_chunk_tokens: longest part of one prompt in one step; None for whatever fits the step.
        max_waiting: sequences that may wait beyond those that can run; more are refused.
        max_adapter_passes: how many sequences may start before one whose adapter finds no room, until those that
            would keep it waiting have to wait behind it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    prefill_block: int
    page_tokens: int
    max_model_len: int
    prefill_chunk_tokens: int | None = None
    max_waiting: int = 1024
    max_adapter_passes: int = 64

    @property
    def max_step_pages(self) -> int:
        """Most KV pages that one step writes to for one sequence."""
        chunk = min(
            self.prefill_chunk_tokens or self.max_num_batched_tokens,
            self.max_num_batched_tokens,
            self.max_prefill_tokens // self.prefill_block * self.prefill_block,
        )
        # A chunk may begin at the last token of a page.
        tokens = min(chunk + self.page_tokens - 1, self.max_model_len)
        return -(-tokens // self.page_tokens)

    def validate(self, *, pool_pages: int, device_pages: int) -> None:
        """Checks the limits against each other and against the KV pages there are.

        Args:
            pool_pages: pages of the pool that sequences may take.
            device_pages: KV pages of the device.

        Raises:
            ValueError: naming every problem and what to change.
        """
        problems = [
            f"{field.name} must be at least 1, got {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "max_waiting" and (value := getattr(self, field.name)) is not None and value < 1
        ]
        if self.max_waiting < 0:
            problems.append(f"max_waiting must be at least 0, got {self.max_waiting}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}, so "
                "not every running sequence would get a token in each step: raise --max_num_batched_tokens or lower "
                "--max_num_seqs"
            )
        if self.max_prefill_tokens < self.prefill_block:
            problems.append(
                f"max_prefill_tokens {self.max_prefill_tokens} is below prefill_block {self.prefill_block}, so no "
                "prompt fits: raise max_prefill_tokens"
            )
        if not problems and pool_pages * self.page_tokens < self.max_model_len:
            problems.append(
                f"the pool holds {pool_pages} KV pages of {self.page_tokens} tokens, fewer than one sequence of "
                f"max_model_len {self.max_model_len} tokens needs: raise --pool_memory_gb or lower --max_model_len"
            )
        if not problems and device_pages < self.max_step_pages:
            problems.append(
                f"the device holds {device_pages} KV pages of {self.page_tokens} tokens, and a step may write to "
                f"{self.max_step_pages} of one sequence: raise --device_kv_mb, or lower --max_num_batched_tokens or "
                "--prefill_chunk_tokens"
            )
        if problems:
            raise ValueError("; ".join(problems))


class StepBudget:
    """What is left of one step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block = config.prefill_block
        self._longest = config.prefill_chunk_tokens or config.max_num_batched_tokens
        self._tokens = config.max_num_batched_tokens
        self._slots = config.max_prefill_tokens

    def fit(self, tokens: int) -> int:
        """How many of a prompt's next `tokens` tokens fit; 0 for none."""
        return max(0, min(tokens, self._longest, self._tokens, self._slots // self._block * self._block))

    def take_decode(self) -> None:
        """Takes the room of one decode row."""
        self._tokens -= 1

    def take_prefill(self, tokens: int) -> None:
        """Takes the room of a chunk that fits."""
        self._tokens -= tokens
        self._slots -= -(-tokens // self._block) * self._block
