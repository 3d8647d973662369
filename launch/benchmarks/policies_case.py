"""What the policies benchmark is asked to measure: options, their checks, and the engine that holds the case."""

from __future__ import annotations

import dataclasses

import numpy as np

from launch.benchmarks.case import split_names
from launch.benchmarks.output import output_problems
from launch.benchmarks.policies_traffic import KINDS
from launch.benchmarks.synthetic import needed_adapter_mb
from launch.console import in_bytes
from launch.flags import StartError
from memory_pool.figures import HardwareError
from memory_pool.hardware import parse_hardware
from plora_jax.config import ModelConfig
from plora_jax.engine.build import EngineConfig, page_layout
from plora_jax.engine.plan_worker import POLICIES as PLANNERS
from plora_jax.parallel import TensorParallel
from strategies.strategy_table import LORA

AUTO, FAR = "auto", "far"
POLICIES = (AUTO, *(name for name in PLANNERS if name != "joint"), *LORA, FAR)
"""The joint planner, the policies it is held to, every strategy forced, and the joint planner for other hardware."""

_LEAST_REST_BYTES = 2**31
"""Of the machine's memory: weights, programs and the rest of the system."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoliciesCase:
    """Traffic, adapters and policies. All requests are greedy and go on to the last token, whatever the model says.

    Attributes:
        policies: what is measured, comma separated: auto (the joint planner), paper, lru, a strategy that is forced
            (resident, fetch, near_data, split), or far (the joint planner, which takes the machine for
            --far_hardware).
        far_hardware: preset or file whose pool is behind a link, so that copies on the device pay: under the policy
            far the device cache is seen to follow the traffic. Its latency is that of a plan for another machine.
        traffics: kinds of traffic, comma separated: uniform, skewed, drifting.
        adapters: how many synthetic adapters are in the pool.
        adapter_ranks: their ranks, in turn; comma separated.
        adapter_targets: their projections, comma separated.
        device_adapter_mb: device memory for adapters, MB of 2^20 bytes.
        concurrency: streams; each sends its next request when one has ended.
        prompt_tokens: tokens of each prompt, drawn at random.
        new_tokens: tokens of an answer on average; each is drawn between half of it and one and a half.
        requests: requests of a run, those of the warm-up included.
        warmup_requests: first requests of a run, which are not measured; twice the streams, so that planners have
            seen requests come and go.
        skew: exponent of the power law: the r-th most popular adapter is asked for in proportion to r ** -skew.
        drift_requests: requests after which other adapters are the popular ones, in drifting traffic.
        runs: runs of each policy under each traffic; figures are medians over them.
        side_by_side: policies that are measured in the same seconds, each by an engine of its own that holds all
            adapters: auto and so many others as are left. 2 at least where auto is held to others.
        turn_steps: steps that one of them makes before it is the next one's turn.
        seed: of the traffic. Run k of every policy has the same requests.
        output_json: file to write all figures to.
    """

    policies: str = ",".join(POLICIES)
    far_hardware: str = "h100"
    traffics: str = ",".join(KINDS)
    adapters: int = 1000
    adapter_ranks: str = "8,16,24,32,48,64"
    adapter_targets: str = "q_proj,v_proj"
    device_adapter_mb: int = 64
    concurrency: int = 32
    prompt_tokens: int = 32
    new_tokens: int = 64
    requests: int = 128
    warmup_requests: int = 64
    skew: float = 1.06
    drift_requests: int = 32
    runs: int = 5
    side_by_side: int = 3
    turn_steps: int = 16
    seed: int = 0
    output_json: str | None = None

    @property
    def policy_names(self) -> list[str]:
        return split_names([self.policies])

    @property
    def traffic_names(self) -> list[str]:
        return split_names([self.traffics])

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Policies that take turns; auto is in each group, where it is measured."""
        reference = (AUTO,) * (AUTO in self.policy_names)
        others = [name for name in self.policy_names if name != AUTO]
        size = max(1, self.side_by_side - len(reference))
        return [(*reference, *others[at : at + size]) for at in range(0, max(1, len(others)), size)]

    @property
    def engines(self) -> int:
        """Engines that the largest group needs."""
        return max(map(len, self.groups))

    @property
    def targets(self) -> list[str]:
        """Projections of the adapters."""
        return split_names([self.adapter_targets])

    @property
    def ranks(self) -> list[int]:
        """Rank of each adapter."""
        cycle = [int(entry) for entry in split_names([self.adapter_ranks])]
        return [cycle[index % len(cycle)] for index in range(self.adapters)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there can be."""
        return self.prompt_tokens + self.new_tokens + self.new_tokens // 2

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        least = {"adapters": 1, "device_adapter_mb": 1, "concurrency": 1, "prompt_tokens": 1, "new_tokens": 2}
        least |= {"runs": 1, "drift_requests": 4, "warmup_requests": 0, "turn_steps": 1, "side_by_side": 1}
        problems = [
            f"--{name} must be at least {bound}, got {value}"
            for name, bound in least.items()
            if (value := getattr(self, name)) < bound
        ]
        for name, given, known in (
            ("policies", self.policy_names, POLICIES),
            ("traffics", self.traffic_names, KINDS),
        ):
            unknown = [entry for entry in given if entry not in known]
            if unknown or not given or len(set(given)) != len(given):
                value = getattr(self, name)
                problems.append(f"--{name} {value!r} must name each at most once, of {', '.join(known)}")
        entries = split_names([self.adapter_ranks])
        if not entries or not all(entry.isdecimal() and int(entry) for entry in entries):
            problems.append(
                f"--adapter_ranks {self.adapter_ranks!r} must be whole numbers above 0 with commas, such as 8,16"
            )
        if self.requests <= self.warmup_requests + self.concurrency:
            problems.append(
                f"--requests {self.requests} must be above --warmup_requests {self.warmup_requests} and --concurrency "
                f"{self.concurrency} together: the last requests of a run are not measured either"
            )
        if self.side_by_side == 1 and AUTO in self.policy_names and len(self.policy_names) > 1:
            problems.append("--side_by_side must be at least 2 where auto is held to other policies, got 1")
        try:
            parse_hardware(self.far_hardware)
        except HardwareError as error:
            problems.append(f"--far_hardware: {error}")
        if not self.skew > 0:
            problems.append(f"--skew must be above 0, got {self.skew}")
        problems += output_problems(self.output_json)
        if problems:
            raise StartError("; ".join(problems))

    def fit(self, engine: EngineConfig, model: ModelConfig, *, memory_bytes: int) -> EngineConfig:
        """The configuration of each engine, with a pool that holds all adapters and streams.

        Args:
            engine: everything else.
            model: base model.
            memory_bytes: of the machine.

        Raises:
            StartError: the model has no such projection, or the pools are more than the machine has.
        """
        unknown = [name for name in self.targets if name not in model.projections]
        if unknown or not self.targets:
            raise StartError(
                f"--adapter_targets {self.adapter_targets!r} names no projection of this model: choose from "
                f"{', '.join(model.projections)}"
            )
        wide = engine.dtype == "float32" or (engine.dtype == "auto" and model.dtype == "float32")
        # bfloat16 and float16 pages are of one size.
        dtype = np.dtype(np.float32 if wide else np.float16)
        parallel = TensorParallel(model, engine.tensor_parallel_size)
        layout = page_layout(parallel, engine, dtype=dtype)
        ranks = [dict.fromkeys(self.targets, rank) for rank in self.ranks]
        sequences = (self.concurrency + 2) * (-(-self.longest // engine.page_tokens) + 1) + engine.pool_devices
        each = (needed_adapter_mb(ranks, layout) * 2**20 + sequences * layout.page_bytes) * engine.tensor_parallel_size
        pool = self.engines * each
        device = self.engines * (self.device_adapter_mb + engine.device_kv_mb) * 2**20
        if pool + device + _LEAST_REST_BYTES > memory_bytes:
            raise StartError(
                f"{self.engines} pools of {self.adapters} adapters take {in_bytes(pool)} beside {in_bytes(device)} of "
                f"device memory and {in_bytes(_LEAST_REST_BYTES)} for everything else, and this machine has "
                f"{in_bytes(memory_bytes)}: lower --side_by_side, --adapters or --adapter_ranks"
            )
        return dataclasses.replace(
            engine,
            pool_memory_gb=1.01 * each / 2**30,
            device_adapter_mb=self.device_adapter_mb,
            max_lora_rank=max(self.ranks),
            max_num_seqs=self.concurrency,
            max_num_batched_tokens=max(engine.max_num_batched_tokens, self.concurrency),
            max_model_len=engine.max_model_len or min(self.longest, model.max_position),
            max_waiting=max(engine.max_waiting, self.requests),
        )
