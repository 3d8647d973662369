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
from strategies.cost.attention_work import AttentionWork, KvLoad, attention_work
from strategies.cost.calibrated import CalibratedModel
from strategies.cost.columns import ATTENTION_COLUMNS, LORA_COLUMNS, NEAR_DATA, NEAR_FLOPS, NEEDS_A, NEEDS_B, SPLIT
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
            f"hardware {hardware.name} has no calibration: "
            "measure it with python -m launch.calibrate, or choose mode ideal"
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

    Raises:
        ValueError: adapters and KV do not fit into a pool device.
    """
    count, hardware = len(adapters.ranks), model.hardware
    tokens = np.asarray(tokens, float)
    everywhere = STRIPED if model.always_striped else 0
    home = np.full(count, everywhere) if home is None or model.always_striped else np.asarray(home)
    near_data = near_data and hardware.pool_device.near_flops_per_s > 0
    size = StepSize(
        tokens=kv.tokens,
        rows=max(kv.tokens, rows or 0),
        sampled=len(kv.contexts) if sampled is None else sampled,
        max_rank=int(adapters.ranks.max(initial=0)),
        striped=bool((home == STRIPED).any()),
        grain=int(np.gcd.reduce(adapters.ranks[tokens > 0].astype(int), axis=None)),
    )
    loads, lanes = _adapter_loads(model, adapters, tokens, home == STRIPED, size), _lane_loads(model, adapters, size)
    base, work = model.base(size), attention_work(model.shape, kv)
    _check_capacity(hardware, adapters, home, work.stored_bytes * kv.share_of(hardware.num_pool_devices))
    current = np.full(count, NOWHERE) if current is None else np.asarray(current)
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
        device_bytes=np.outer(adapters.stored_a_bytes, NEEDS_A) + np.outer(adapters.stored_b_bytes, NEEDS_B),
        allowed=_allowed(allowed, count, near_data=near_data),
        active=tokens >= 1 if active is None else np.asarray(active, bool),
        current=current,
        move_s=_move_s(model, adapters, home, current) / horizon_steps,
        budget_bytes=budget_bytes,
        kv=_kv_choice(
            model,
            kv,
            work,
            near_data=near_data,
            horizon_steps=horizon_steps,
            budgets=(adapter_budget_bytes, kv_budget_bytes),
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


def _lane_loads(model: CostModel, adapters: AdapterFeatures, size: StepSize) -> LoraLoads:
    """Loads of lanes. Pool devices that are one and the same add up, but pinned adapters have one call for all."""
    touched = np.asarray(np.any(adapters.pieces > 0, axis=0))
    lanes, devices = model.lanes(touched, size), model.hardware.num_pool_devices
    if model.hardware.shared and not size.striped and devices > 1:
        lanes.load_s[..., NEAR_FLOPS:] /= devices
    return lanes


def _check_capacity(hardware: HardwareSpec, adapters: AdapterFeatures, home: np.ndarray, kv_bytes: np.ndarray) -> None:
    capacity, devices = hardware.pool_device.capacity_bytes, hardware.num_pool_devices
    if capacity is None:
        return
    stored = adapters.stored_a_bytes + adapters.stored_b_bytes
    striped = home == STRIPED
    held = kv_bytes + stored[striped].sum() / devices
    held = held + np.bincount(home[~striped], stored[~striped], minlength=devices)
    if (fullest := float(held.max())) > capacity:
        raise ValueError(
            f"pool device {int(held.argmax())} would hold {fullest / 1e9:.0f} GB of adapters and KV, it has "
            f"{capacity / 1e9:.0f}: take more pool devices, spread homes, or serve fewer adapters"
        )


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
    work: AttentionWork,
    *,
    near_data: bool,
    horizon_steps: float,
    budgets: tuple[float | None, float | None],
) -> KvChoice:
    loads = model.attention(kv)
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
        adapter_budget_bytes=budgets[0],
        kv_budget_bytes=budgets[1],
        min_fraction=kv.min_fraction,
    )
