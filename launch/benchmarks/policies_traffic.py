"""Requests of the policies benchmark: which adapter each asks for, under three kinds of traffic.

uniform: any adapter. skewed: a power law over all adapters. drifting: the same, but after so many requests other
adapters are the popular ones. Draws are independent of one another: locality beyond popularity is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from launch.benchmarks.measurement import Job

KINDS = ("uniform", "skewed", "drifting")


class Traffic(NamedTuple):
    """The requests of one run.

    Attributes:
        adapters: [requests] adapter of each, in the order in which they are sent.
        new_tokens: [requests] length of each answer.
        prompts: [requests, prompt tokens] token ids.
        by_popularity: [periods, adapters] adapters, most popular first; of uniform traffic in any order.
        period_requests: requests of a period.
    """

    adapters: np.ndarray
    new_tokens: np.ndarray
    prompts: np.ndarray
    by_popularity: np.ndarray
    period_requests: int

    def jobs(self, names: list[str]) -> list[Job]:
        """The requests as a client sends them.

        Args:
            names: of the adapters.
        """
        return [
            Job(prompt, names[adapter], length)
            for prompt, adapter, length in zip(
                self.prompts.tolist(), self.adapters.tolist(), self.new_tokens.tolist(), strict=True
            )
        ]


def make_traffic(
    kind: str,
    *,
    seed: int,
    requests: int,
    adapters: int,
    skew: float,
    drift_requests: int,
    prompt_tokens: int,
    new_tokens: int,
    ids_range: tuple[int, int],
) -> Traffic:
    """The requests of one run; the same arguments give the same.

    Args:
        kind: of KINDS.
        seed: of all draws.
        requests: how many.
        adapters: how many there are.
        skew: exponent of the power law.
        drift_requests: requests of a period of drifting traffic.
        prompt_tokens: of each prompt.
        new_tokens: of an answer on average; drawn between half of it and one and a half.
        ids_range: token ids of prompts, [low, high).
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    period = drift_requests if kind == "drifting" else requests
    by_popularity = np.stack([rng.permutation(adapters) for _ in range(-(-requests // period))])
    weights = np.arange(1, adapters + 1, dtype=float) ** (0.0 if kind == "uniform" else -skew)
    drawn = rng.choice(adapters, requests, p=weights / weights.sum())
    return Traffic(
        adapters=by_popularity[np.arange(requests) // period, drawn],
        new_tokens=rng.integers(-(-new_tokens // 2), new_tokens + new_tokens // 2, requests, endpoint=True),
        prompts=rng.integers(*ids_range, (requests, prompt_tokens)),
        by_popularity=by_popularity,
        period_requests=period,
    )
