"""Batches of few shapes: examples of like length together, padded to a multiple of 32 tokens.

Padding stands at the end, where causal attention keeps it from every real token, so a batch needs no attention mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from plora_jax.training.data import Example

LENGTH_MULTIPLE = 32


class Batch(NamedTuple):
    """Rows of one forward pass.

    Attributes:
        tokens_BT: [B, T] int32, 0 where there is no token.
        learned_BT: [B, T] bool; column 0 is False, since nothing predicts a first token.
        num_tokens: real tokens, padding not counted.
    """

    tokens_BT: np.ndarray
    learned_BT: np.ndarray
    num_tokens: int


class BatchPlan:
    """The batches of every epoch, each a function of the examples, the seed and the epoch alone.

    Args:
        examples: at least one, none longer than `max_length`.
        batch_size: rows of every batch; the last batch of an epoch has empty rows.
        max_length: longest padded row.
        seed: of the order.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int, *, max_length: int, seed: int) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed
        self._padded = [_padded_length(len(example.token_ids), max_length) for example in examples]
        self._order: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        """Batches in one epoch."""
        return -(-len(self._examples) // self._batch_size)

    def training_batch(self, position: int) -> Batch:
        """The batch at a position of the endless sequence of shuffled epochs."""
        epoch, index = divmod(position, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        return self._batch(self._order[1][index])

    def all_batches(self) -> list[Batch]:
        """Every example once, shortest first."""
        order = np.argsort(self._padded, kind="stable")
        return [self._batch(rows) for rows in np.array_split(order, self._cuts())]

    def fingerprint(self) -> str:
        """Identifies examples and order: equal for equal data, batch size and seed."""
        digest = hashlib.sha256(f"{self._batch_size} {self._seed} {self._padded}".encode())
        for example in self._examples:
            digest.update(example.token_ids.tobytes())
            digest.update(example.learned.tobytes())
        return digest.hexdigest()[:16]

    def _cuts(self) -> list[int]:
        return list(range(self._batch_size, len(self._examples), self._batch_size))

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._examples))
        # A stable sort by padded length alone keeps the random order among examples of one shape.
        order = order[np.argsort(np.asarray(self._padded)[order], kind="stable")]
        batches = np.array_split(order, self._cuts())
        return [batches[index] for index in rng.permutation(len(batches))]

    def _batch(self, rows: np.ndarray) -> Batch:
        length = max(self._padded[row] for row in rows)
        tokens = np.zeros((self._batch_size, length), np.int32)
        learned = np.zeros((self._batch_size, length), bool)
        for place, row in enumerate(rows):
            example = self._examples[row]
            tokens[place, : len(example.token_ids)] = example.token_ids
            learned[place, : len(example.token_ids)] = example.learned
        learned[:, 0] = False
        return Batch(tokens, learned, sum(len(self._examples[row].token_ids) for row in rows))


def _padded_length(length: int, max_length: int) -> int:
    return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, max_length)
