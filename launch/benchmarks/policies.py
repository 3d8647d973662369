"""Measures the mean decode latency of every policy over many adapters, under uniform, skewed and drifting traffic.

  python -m launch.bench policies --hardware=machine.json
      1000 adapters, 5 runs of 7 policies under 3 kinds of traffic; machine.json as launch.calibrate writes it

  python -m launch.bench policies --adapters=100 --runs=1 --requests=128 --policies=auto,near_data --traffics=skewed
      a quick look

All adapters are loaded once into the pools of --side_by_side engines. A run is that of auto and of some other policies
under the same requests, each by an engine of its own, which take turns of --turn_steps steps: so they meet the same
machine, however fast it is that minute, and "over auto" is the median of their ratios, run by run. The first steps of a
turn, which find nothing in the caches, are left out of all times. Before a run the devices are emptied of adapters and
the policies begin with nothing known. --concurrency streams send one request after the other; what is measured ends
before streams run out of requests. Policies are compared by "ms": the mean ITL of steps that only decode, times the
streams there should be over those that ran, as a stream that waits for room for its adapter gets no token either. p50
and p99 are of the same steps. "all ITL" counts steps that compute prompts, too.
The policy far is not part of the comparison: it shows what the planner caches where the pool is behind a link.
Progress goes to standard error, the report to standard output; figures are medians over the runs. The exit code says
nothing about them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.engine_client import EngineTarget
from launch.benchmarks.machine import describe_machine, describe_software, memory_bytes
from launch.benchmarks.output import write_json
from launch.benchmarks.policies_case import AUTO, FAR, PoliciesCase
from launch.benchmarks.policies_figures import RunFigures, run_figures
from launch.benchmarks.policies_report import Measured, PoliciesReport
from launch.benchmarks.policies_traffic import Traffic, make_traffic
from launch.benchmarks.policies_watch import WatchedPlanner
from launch.benchmarks.report import System
from launch.benchmarks.synthetic import adapter_name, synthetic_adapter
from launch.benchmarks.turns import Turns
from launch.console import StageLog
from launch.flags import StartError
from plora_jax.adapters import Adapter
from plora_jax.checkpoints import load_config
from plora_jax.engine.build import Deployment, EngineConfig, build_engine
from plora_jax.engine.compile import counter
from plora_jax.engine.errors import EngineDeadError, GenerationFailedError
from plora_jax.engine.placement import PlacementPlanner
from plora_jax.engine.restart import restart
from strategies.strategy_table import LORA

_NOT_FLAGS = (
    "seed",
    "enable_lora",
    "max_lora_rank",
    "max_num_seqs",
    "max_waiting",
    "lora_strategy",
    "planner",
    "pool_memory_gb",
    "device_adapter_mb",
)
"""Options of the engine about which the case decides."""

_PROMPT_IDS = (1000, 40000)


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option of the case, and of the engine as far as the case leaves it open."""
    flags.define(PoliciesCase, flag_values=flag_values)
    flags.define(EngineConfig, leave_out=_NOT_FLAGS, flag_values=flag_values)


def read_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> tuple[PoliciesCase, EngineConfig]:
    """The case and the engine.

    Raises:
        StartError: values that cannot be.
    """
    case = flags.read(PoliciesCase, flag_values=flag_values)
    case.validate()
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    engine = flags.read(EngineConfig, flag_values=flag_values, **{name: defaults[name] for name in _NOT_FLAGS})
    try:
        engine.validate()
    except ValueError as error:
        raise StartError(str(error)) from error
    return case, engine


class Bench:
    """A started engine with the adapters of a case.

    Args:
        case: what to measure.
        deployment: started, with all adapters.
        adapters: identities, by number.
    """

    def __init__(self, case: PoliciesCase, deployment: Deployment, adapters: list[int]) -> None:
        self._case, self._deployment = case, deployment
        self._names = [adapter_name(index) for index in range(case.adapters)]
        self._index_of = {identity: index for index, identity in enumerate(adapters)}
        sizes = {status.name: status.nbytes for status in deployment.engine.adapters()}
        self._sizes = [sizes[name] for name in self._names]

    def traffic(self, kind: str, seed: int) -> Traffic:
        """The requests of a run."""
        case, vocabulary = self._case, self._deployment.model.vocab_size
        low, high = _PROMPT_IDS[0] if _PROMPT_IDS[0] < vocabulary else 0, min(_PROMPT_IDS[1], vocabulary)
        return make_traffic(
            kind,
            seed=seed,
            requests=case.requests,
            adapters=case.adapters,
            skew=case.skew,
            drift_requests=case.drift_requests,
            prompt_tokens=case.prompt_tokens,
            new_tokens=case.new_tokens,
            ids_range=(low, high),
        )

    def run(self, policy: str, traffic: Traffic, turns: Turns, place: int) -> RunFigures:
        """One run of a policy, from an empty device.

        Args:
            policy: of POLICIES.
            traffic: what is asked for.
            turns: of all engines that run at this time.
            place: of this engine among them.

        Raises:
            StartError: the engine could not serve it.
        """
        try:
            return self._run(policy, traffic, functools.partial(turns.take, place))
        finally:
            turns.leave(place)

    def _run(self, policy: str, traffic: Traffic, wait: Callable[[], int]) -> RunFigures:
        case, deployment = self._case, self._deployment
        pool = deployment.adapters
        assert pool is not None
        found: list[WatchedPlanner] = []

        def watch(planner: PlacementPlanner | None) -> PlacementPlanner:
            last = case.requests - case.concurrency // 2
            first = max(1, case.warmup_requests)
            found.append(WatchedPlanner(planner, pool, deployment.ledger, first=first, last=last, wait=wait))
            return found[0]

        fixed = policy in LORA
        restart(
            deployment,
            lora_strategy=policy if fixed else "auto",
            planner="joint" if fixed or policy in (AUTO, FAR) else policy,
            hardware=case.far_hardware if policy == FAR else None,
            wrap=watch,
        )
        try:
            EngineTarget(deployment.engine).run(traffic.jobs(self._names), concurrency=case.concurrency)
        except (ValueError, EngineDeadError, GenerationFailedError) as error:
            raise StartError(f"the engine could not serve the case: {error}") from error
        return run_figures(
            found[0],
            concurrency=case.concurrency,
            traffic=traffic,
            index_of=self._index_of,
            sizes=self._sizes,
            room=case.device_adapter_mb * 2**20,
        )


def run_policies(case: PoliciesCase, engine: EngineConfig, *, command: str, log: StageLog) -> PoliciesReport:
    """Measures a case.

    Args:
        case: what to measure.
        engine: everything that the case leaves open.
        command: command line that asks for this.
        log: told how far it is.

    Raises:
        StartError: the case cannot be measured.
    """
    with _running(case, engine, log) as (benches, deployment):
        warm = benches[0].traffic(case.traffic_names[0], seed=case.seed)
        _side_by_side(benches, case.groups[0][:1] * len(benches), warm, steps=case.turn_steps)
        compiled = counter.count
        runs: dict[tuple[str, str], list[RunFigures]] = {}
        beside: dict[tuple[str, str], list[RunFigures]] = {}
        for number in range(case.runs):
            for kind, group in itertools.product(case.traffic_names, case.groups):
                # Engines differ a little in where their memory lies: each policy has each of them in turn.
                group = (*group[number % len(group) :], *group[: number % len(group)])
                traffic = benches[0].traffic(kind, seed=case.seed + number)
                found = dict(zip(group, _side_by_side(benches, group, traffic, steps=case.turn_steps), strict=True))
                for policy, figures in found.items():
                    runs.setdefault((kind, policy), []).append(figures)
                    beside.setdefault((kind, policy), []).extend([found[AUTO]] * (AUTO in found))
                said = ", ".join(f"{policy} {1000 * figures.latency_s:.2f}" for policy, figures in found.items())
                log.say(f"run {number + 1}/{case.runs}", f"{kind}: {said} ms")
        return PoliciesReport(
            case=_case_in_words(case),
            options=dataclasses.asdict(case),
            system=_system(deployment),
            planning=deployment.planning or "off",
            machine=describe_machine(),
            software=describe_software(),
            measured=[
                Measured(kind, policy, tuple(runs[kind, policy]), tuple(beside[kind, policy]))
                for kind in case.traffic_names
                for policy in case.policy_names
            ],
            compilations=counter.count - compiled,
            command=command,
            measured_at=datetime.datetime.now(datetime.UTC),
        )


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case, engine = read_flags()
    command = shlex.join(["python", "-m", "launch.bench", "policies", *sys.argv[1:]])
    report = run_policies(case, engine, command=command, log=StageLog(Console(stderr=True)))
    print(report.as_text())
    write_json(case.output_json, report.as_json())
    return 0


def _side_by_side(
    benches: Sequence[Bench], policies: Sequence[str], traffic: Traffic, *, steps: int
) -> list[RunFigures]:
    """A run of each policy, by an engine of its own; they take turns."""
    turns = Turns(len(policies), steps=steps)
    with ThreadPoolExecutor(len(policies)) as threads:
        runs = [
            threads.submit(bench.run, policy, traffic, turns, place)
            for place, (bench, policy) in enumerate(zip(benches, policies, strict=False))
        ]
    return [run.result() for run in runs]


@contextlib.contextmanager
def _running(case: PoliciesCase, engine: EngineConfig, log: StageLog) -> Iterator[tuple[list[Bench], Deployment]]:
    """Engines that hold the adapters of a case, started; and the first one's deployment."""
    with contextlib.ExitStack() as running:
        benches, deployments = [], []
        for _ in range(case.engines):
            try:
                model = load_config(engine.model)
                deployment = build_engine(case.fit(engine, model, memory_bytes=memory_bytes()), progress=log)
                log.end()
                deployment.wait_until_settled()
                identities = _load_adapters(case, deployment, log)
            except (ValueError, OSError) as error:
                raise StartError(str(error)) from error
            finally:
                log.end()
            deployment.engine.start()
            running.callback(deployment.engine.shutdown)
            deployments.append(deployment)
            benches.append(Bench(case, deployment, identities))
        yield benches, deployments[0]


def _load_adapters(case: PoliciesCase, deployment: Deployment, log: StageLog) -> list[int]:
    """Puts the adapters into the pool; those of one rank have the same numbers, each its own pages."""
    log.stage("adapters")
    drawn: dict[int, Adapter] = {}
    identities = []
    for index, rank in enumerate(case.ranks):
        if rank not in drawn:
            drawn[rank] = synthetic_adapter(index, rank=rank, targets=case.targets, config=deployment.model)
        like = drawn[rank]
        adapter = Adapter(adapter_name(index), like.modules, like.config)
        deployment.engine.add_adapter(adapter)
        identities.append(adapter.identity)
        log.advance(index + 1, case.adapters)
    return identities


def _system(deployment: Deployment) -> System:
    return System(
        f"{deployment.engine.model_name}, {deployment.precision}, adapters loaded: {len(deployment.engine.adapters())}",
        options=dataclasses.asdict(deployment.config),
        device_bytes=deployment.device_bytes(),
    )


def _case_in_words(case: PoliciesCase) -> str:
    ranks = ", ".join(str(rank) for rank in dict.fromkeys(case.ranks))
    return (
        f"{case.adapters} synthetic adapters, rank {ranks} on {case.adapter_targets}, "
        f"{case.device_adapter_mb} MB of device memory for them; {case.concurrency} streams, {case.requests} requests "
        f"a run of {case.prompt_tokens} + {case.new_tokens} tokens on average, greedy, ignore_eos; power law of "
        f"exponent {case.skew}, drift each {case.drift_requests} requests; seed {case.seed}; {case.engines} engines "
        f"take turns of {case.turn_steps} steps"
    )
