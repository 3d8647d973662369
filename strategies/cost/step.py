"""A step as a plan problem: adapters, their tokens and the KV of the running sequences, in seconds and bytes.

    model = cost_model(shape, hardware, "ideal")
    features = adapter_features(shape, ranks)             # once an adapter is loaded
    problem = plan_problem(model, features, decoding(contexts), tokens=tokens, budget_bytes=40e9)
    evaluate(problem, strategy, "distributed", 0.0).step_s

Adapters without tokens cost no time to build, so a thousand known ones beside 32 in use are cheap.
"""

from __future__ import annotations

import numpy as np

from memory_pool.hardware import HardwareSpec
from strategies.cost.attention_work import KvLoad, attention_work
from strategies.cost.calibrated import CalibratedModel
from strategies.cost.columns import ATTENTION_COLUMNS, LORA_COLUMNS, NEAR_DATA, NEEDS_A, NEEDS_B, SPLIT
from strategies.cost.cost_model import CostModel, LoraLoads, StepSize
from strategies.cost.features import AdapterFeatures
from strategies.cost.ideal import IdealModel
from strategies.cost.paper import PaperModel
from strategies.cost.shapes import ModelShape
from strategies.planner.problem import NOWHERE, RESOURCES, STRIPED, KvChoice, PlanProblem

MODES = ("paper", "ideal", "calibrated")
HORIZON_STEPS = 100.0


def cost_model(shape: ModelShape, hardware: HardwareSpec, mode: str = "ideal") -> CostModel:
    """The cost model of a mode.

    Args:
        shape: of the base model.
        hardware: of the machine; `calibrated` needs its calibration.
        mode: of MODES.

    Raises:
        ValueError: there is no such mode, or the hardware lacks the calibration that it needs.
    """
    if mode == "ideal":
        return IdealModel(shape, hardware)
    if mode == "paper":
        return PaperModel(shape, hardware)
    if mode != "calibrated":
        raise ValueError(f"mode {mode!r} of the cost model is unknown: choose {', '.join(MODES)}")
    if hardware.calibration is None:
        raise ValueError(
            f"hardware {hardware.name} has no calibration: measure it with python -m launch.calibrate, or choose mode ideal"
        )
    return CalibratedModel(shape, hardware, hardware.calibration)


def plan_problem(
    model: CostModel,
    adapters: AdapterFeatures,
    kv: KvLoad,
    *,
    tokens: np.ndarray,
    budget_bytes: float,
    rows: int | None = None,
    sampled: int | None = None,
    active: np.ndarray | None = None,
    home: np.ndarray | None = None,
    current: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
    near_data: bool = True,
    horizon_steps: float = HORIZON_STEPS,
    adapter_budget_bytes: float | None = None,
    kv_budget_bytes: float | None = None,
) -> PlanProblem:
    """The problem of who is served how in the coming steps, each of which has these tokens.

    Args:
        model: what work costs.
        adapters: of N adapters.
        kv: of the running sequences; their queries are the tokens of the step, with those of the base model.
        tokens: [N] of each adapter in a step; of idle ones what is expected, below 1 or 0.
        budget_bytes: device memory for adapters and KV.
        rows: of the compiled program; None for the tokens of the step.
        sampled: rows that the head is applied to; None for one a sequence.
        active: [N] bool; None for those with at least one token.
        home: [N] pool device, or STRIPED; None for all on pool device 0.
        current: [N] strategy column that serves each, or NOWHERE; None for NOWHERE.
        allowed: [N, S] bool; None for all. Where there is no near-data compute what needs it is taken out.
        near_data: whether near-data functions work here.
        horizon_steps: over which the cost of a move is spread.
        adapter_budget_bytes: limit for adapters alone.
        kv_budget_bytes: limit for KV alone.
    """
    count, hardware = len(adapters.ranks), model.hardware
    tokens = np.asarray(tokens, float)
    home = np.zeros(count, int) if home is None else np.asarray(home)
    if model.always_striped:
        home = np.full(count, STRIPED)
    near_data = near_data and hardware.pool_device.near_flops_per_s > 0
    size = StepSize(
        tokens=kv.tokens,
        rows=max(kv.tokens, rows or 0),
        sampled=len(kv.contexts) if sampled is None else sampled,
        max_rank=int(adapters.ranks.max(initial=0)),
        striped=bool((home == STRIPED).any()),
    )
    loads = _adapter_loads(model, adapters, tokens, home == STRIPED, size)
    lanes = model.lanes((adapters.pieces > 0).any(axis=0), size)
    current = np.full(count, NOWHERE) if current is None else np.asarray(current)
    device_bytes = np.outer(adapters.stored_a_bytes, NEEDS_A) + np.outer(adapters.stored_b_bytes, NEEDS_B)
    base = model.base(size)
    return PlanProblem(
        strategies=LORA_COLUMNS,
        phases=tuple(phase.name for phase in model.shape.phases),
        groups=model.groups,
        pool_shared=bool(hardware.shared),
        load_s=loads.load_s,
        serial_s=loads.serial_s,
        home=home,
        fixed_load_s=lanes.load_s,
        fixed_serial_s=lanes.serial_s,
        base_load_s=np.repeat(base[:, None], hardware.num_pool_devices, axis=1),
        base_serial_s=np.zeros(len(base)),
        device_bytes=device_bytes,
        allowed=_allowed(allowed, count, near_data=near_data),
        active=tokens >= 1 if active is None else np.asarray(active, bool),
        current=current,
        move_s=_move_s(model, adapters, home, current) / horizon_steps,
        budget_bytes=budget_bytes,
        kv=_kv_choice(
            model,
            kv,
            near_data=near_data,
            horizon_steps=horizon_steps,
            adapter_budget_bytes=adapter_budget_bytes,
            kv_budget_bytes=kv_budget_bytes,
        ),
    )


def _adapter_loads(
    model: CostModel, adapters: AdapterFeatures, tokens: np.ndarray, striped: np.ndarray, size: StepSize
) -> LoraLoads:
    """Loads of those with tokens, zeros for the others."""
    busy = np.flatnonzero(tokens > 0)
    if len(busy) == len(tokens):
        return model.adapters(adapters, tokens, striped=striped, size=size)
    shape = (len(tokens), len(LORA_COLUMNS), len(model.shape.phases), len(RESOURCES))
    load_s, serial_s = np.zeros(shape), np.zeros(shape[:-1])
    found = model.adapters(adapters.take(busy), tokens[busy], striped=striped[busy], size=size)
    load_s[busy], serial_s[busy] = found
    return LoraLoads(load_s, serial_s)


def _allowed(allowed: np.ndarray | None, count: int, *, near_data: bool) -> np.ndarray:
    allowed = np.ones((count, len(LORA_COLUMNS)), bool) if allowed is None else np.array(allowed, bool)
    if not near_data:
        allowed[:, [NEAR_DATA, SPLIT]] = False
    return allowed


def _move_s(model: CostModel, adapters: AdapterFeatures, home: np.ndarray, current: np.ndarray) -> np.ndarray:
    """[N, S] seconds of the link until what a strategy needs and the device lacks is there."""
    placed = current != NOWHERE
    move_s = np.zeros((len(current), len(LORA_COLUMNS)))
    for needs, stored in ((NEEDS_A, adapters.stored_a_bytes), (NEEDS_B, adapters.stored_b_bytes)):
        lacking = np.where(placed, 1 - needs[current], 1.0) * stored
        move_s += np.outer(lacking, needs)
    links = np.where(home == STRIPED, model.hardware.num_pool_devices, 1)
    return np.asarray(model.crossing_s(move_s / links[:, None]))


def _kv_choice(
    model: CostModel,
    kv: KvLoad,
    *,
    near_data: bool,
    horizon_steps: float,
    adapter_budget_bytes: float | None,
    kv_budget_bytes: float | None,
) -> KvChoice:
    loads, work = model.attention(kv), attention_work(model.shape, kv)
    kept = len(ATTENTION_COLUMNS) if near_data else 1
    largest = work.stored_bytes * float(kv.share_of(model.hardware.num_pool_devices).max())
    return KvChoice(
        strategies=ATTENTION_COLUMNS[:kept],
        phase=model.shape.attention_phase,
        device_bytes=work.stored_bytes,
        device_load_s=loads.device_s,
        pool_load_s=loads.pool_s[:kept],
        pool_serial_s=loads.serial_s[:kept],
        current_fraction=kv.current_fraction,
        move_s=float(model.crossing_s(largest)) / horizon_steps,
        adapter_budget_bytes=adapter_budget_bytes,
        kv_budget_bytes=kv_budget_bytes,
        min_fraction=kv.min_fraction,
    )
