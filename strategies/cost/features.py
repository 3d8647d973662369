"""What is known of adapters before it is known how many tokens they have: sums over matrices, phase by phase.

An adapter's ranks never change, so its features are made once; a step's work is then linear in them, with factors from
its tokens. Numbers are of one shard.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategies.cost.shapes import ModelShape, distinct

SHRINK_TOKENS, EXPAND_TOKENS = 4, 2
"""Tokens that share one pass of the native kernels over rows in the cache; what is left goes one by one."""


class AdapterFeatures(NamedTuple):
    """Of N adapters, in F phases, all layers. What has experts counts one expert's matrices.

    Attributes:
        ranks: [N, J].
        a_bytes: [N, F], bytes of A.
        b_bytes: [N, F], bytes of B.
        components: [N, F], rank components: sum of r.
        inputs: [N, F], numbers of x for a token: the shared input once.
        outputs: [N, F], numbers of y for a token.
        pieces: [N, F], matrices.
        stored_a_bytes: [N], A as it is kept, all experts.
        stored_b_bytes: [N], the same of B.
    """

    ranks: np.ndarray
    a_bytes: np.ndarray
    b_bytes: np.ndarray
    components: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    pieces: np.ndarray
    stored_a_bytes: np.ndarray
    stored_b_bytes: np.ndarray

    def take(self, rows: np.ndarray) -> AdapterFeatures:
        """The features of some adapters."""
        return AdapterFeatures(*(values[rows] for values in self))


def adapter_features(shape: ModelShape, ranks: np.ndarray, *, page_bytes: float = 0) -> AdapterFeatures:
    """The features of adapters.

    Args:
        shape: of the base model.
        ranks: [N, J], of each projection of `shape.names`; 0 where an adapter does not change it.
        page_bytes: A and B are kept in whole pages of so many bytes; 0 for as many bytes as they have.

    Raises:
        ValueError: the ranks are of another number of projections.
    """
    ranks = np.asarray(ranks)
    if ranks.ndim != 2 or ranks.shape[1] != len(shape.names):
        raise ValueError(
            f"ranks have shape {ranks.shape}: {shape.name} needs [adapters, {len(shape.names)}] for {shape.names}"
        )
    item, phases = shape.bytes_of_lora, shape.phases
    of_phase = np.zeros((len(shape.names), len(phases)))
    of_phase[np.arange(len(shape.names)), shape.phase_of] = [phases[f].layers for f in shape.phase_of]
    widths_in, widths_out = (
        np.array([getattr(m, side) for m in shape.matrices], float) for side in ("inputs", "outputs")
    )
    has = (ranks > 0).astype(float)
    a_bytes, b_bytes = (
        ranks @ (of_phase * (item * widths_in)[:, None]),
        ranks @ (of_phase * (item * widths_out)[:, None]),
    )
    x_numbers = np.array([phase.layers * phase.inputs * phase.input_rows for phase in phases], float)
    pieces = has @ of_phase
    copies, chosen = (np.array([getattr(phase, name) for phase in phases], float) for name in ("experts", "chosen"))
    stored = [(side @ copies) for side in (a_bytes, b_bytes)]
    if page_bytes:
        stored = [np.ceil(side / page_bytes) * page_bytes for side in stored]
    return AdapterFeatures(
        ranks=ranks,
        a_bytes=a_bytes,
        b_bytes=b_bytes,
        components=ranks @ of_phase,
        inputs=(pieces > 0) * x_numbers,
        outputs=has @ (of_phase * widths_out[:, None]) * chosen,
        pieces=pieces,
        stored_a_bytes=stored[0],
        stored_b_bytes=stored[1],
    )


class AdapterWork(NamedTuple):
    """What tokens make of features: [N, F] each, all layers. Expected values where tokens are.

    Attributes:
        a_bytes: of A that are read.
        b_bytes: of B that are read.
        a_flops: of the shrink.
        b_flops: of the expand.
        x_bytes: of x.
        y_bytes: of y.
        m_bytes: of the product with A.
    """

    a_bytes: np.ndarray
    b_bytes: np.ndarray
    a_flops: np.ndarray
    b_flops: np.ndarray
    x_bytes: np.ndarray
    y_bytes: np.ndarray
    m_bytes: np.ndarray


def adapter_work(shape: ModelShape, features: AdapterFeatures, tokens: np.ndarray) -> AdapterWork:
    """The work of adapters in a step.

    Args:
        shape: of the base model.
        features: of N adapters.
        tokens: [N], of each; below 1 the chance of having one.
    """
    item, column = shape.item_bytes, tokens[:, None]
    read = reads(shape, tokens)
    chosen = np.array([phase.chosen for phase in shape.phases], float)
    per_token = column * (2 / shape.bytes_of_lora * chosen)
    return AdapterWork(
        a_bytes=read * features.a_bytes,
        b_bytes=read * features.b_bytes,
        a_flops=per_token * features.a_bytes,
        b_flops=per_token * features.b_bytes,
        x_bytes=column * item * features.inputs,
        y_bytes=column * item * features.outputs,
        m_bytes=column * item * chosen * features.components,
    )


def reads(shape: ModelShape, tokens: np.ndarray) -> np.ndarray:
    """[N, F] or [N, 1], how often a matrix is read for these tokens: once, or once an expert that they hit."""
    if all(phase.experts == 1 for phase in shape.phases):
        return distinct(tokens, 1, 1)[:, None]
    return np.stack([distinct(tokens, phase.experts, phase.chosen) for phase in shape.phases], axis=1)


def passes(tokens: np.ndarray, together: int) -> np.ndarray:
    """How often a kernel goes over rows for tokens, of which it takes so many at once and the rest one by one."""
    return np.floor(tokens / together) + np.ceil(tokens % together)
