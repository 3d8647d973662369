"""Random planning problems: some as STRATEGIES would have them on real machines, some only meant to be hard.

    problem = random_instance(seed)          the same problem for the same seed, whatever is asked before

Sizes, machines, budgets and moods are drawn from the seed. The realistic ones follow the bytes and FLOPs of the four
strategies over the matrices of a model; the hard ones have loads without structure, lumps, ties, and bytes that
follow the gains.
"""

from __future__ import annotations

import numpy as np

from memory_pool.hardware import DEVICES, LINKS, POOL_DEVICES
from strategies.planner.problem import NOWHERE, RESOURCES, STRIPED, KvChoice, PlanProblem

NAMES = ("resident", "fetch", "near_data", "split")
RESIDENT, FETCH, NEAR, SPLIT = range(4)
DEV_F, DEV_M, NEAR_F, NEAR_M, TO_POOL, TO_DEVICE = range(6)
PHASES = ("qkv", "attention", "o", "gate_up", "down", "head")
APART = tuple((name,) for name in RESOURCES)
GROUPS = (APART, (*APART[:4], ("to_pool", "to_device")), (("device_flops", "near_flops"), *APART[1:2], *APART[3:]))
TOGETHER = (RESOURCES,)
SIZES = (10, 14, 20, 32, 50, 100, 200, 500, 1000)

# layers, width, kv width, ffn width, vocabulary
MODELS = (
    (32, 4096, 4096, 11008, 32000),
    (40, 5120, 5120, 13824, 32000),
    (32, 4096, 1024, 14336, 128256),
    (30, 576, 192, 1536, 49152),
)


def _matrices(model):
    """[(phase, in, out, reads the same x as the one before)]."""
    _, width, kv, ffn, _ = model
    return [
        (0, width, width, False),
        (0, width, kv, True),
        (0, width, kv, True),
        (2, width, width, False),
        (3, width, ffn, False),
        (3, width, ffn, True),
        (4, ffn, width, False),
    ]


def _machine(rng):
    kind = rng.choice(["paper", "host", "cpu", "odd"], p=[0.4, 0.2, 0.2, 0.2])
    d = int(rng.integers(1, 9))
    if kind == "paper":
        return DEVICES["h100"], LINKS["paper"], POOL_DEVICES["paper"], d, APART, False
    if kind == "host":
        device = DEVICES[str(rng.choice(["a100", "h100", "tpu-v5e"]))]
        return device, LINKS[str(rng.choice(["pcie4", "pcie5"]))], POOL_DEVICES["cpu"], 1, APART, False
    if kind == "cpu":
        return DEVICES["cpu"], LINKS["copy"], POOL_DEVICES["cpu"], int(rng.integers(1, 3)), TOGETHER, True
    device = DEVICES[str(rng.choice(["h200", "tpu-v6e"]))]
    link = LINKS[str(rng.choice(["cxl2", "nvlink4", "c2c-measured"]))]
    pool = POOL_DEVICES[str(rng.choice(["monde", "karat", "attacc"]))]
    return device, link, pool, d, GROUPS[rng.integers(len(GROUPS))], bool(rng.random() < 0.2)


def realistic(rng, n):
    """A serving step of a real model on a real machine."""
    model = MODELS[rng.integers(len(MODELS))]
    device, link, pool, d, groups, shared = _machine(rng)
    layers, width, kv_width, ffn, vocabulary = model
    num_phases, size = len(PHASES), 2.0
    ranks = rng.choice([8, 16, 32, 64, 128], n).astype(float)
    tokens = rng.choice([1.0, 1.0, 1.0, 2.0, 4.0, 16.0], n)
    share_active = 1.0 if rng.random() < 0.3 else min(1.0, rng.choice([8, 32, 64]) / n)
    active = rng.random(n) < share_active
    if not active.any():
        active[0] = True
    weight = np.where(active, 1.0, rng.choice([0.0, 0.01, 0.1]) * rng.random(n))
    targets = [rng.random(n) < 0.9 for _ in range(7)]
    home = rng.integers(0, d, n)
    if rng.random() < 0.3:
        home[:] = STRIPED
    elif rng.random() < 0.3:
        home[rng.random(n) < 0.3] = STRIPED

    load, serial = np.zeros((n, 4, num_phases, 6)), np.zeros((n, 4, num_phases))
    part = np.where(home == STRIPED, 1.0 / d, 1.0)
    a_all, b_all = np.zeros(n), np.zeros(n)
    near_flops_per_s = pool.near_flops_per_s or 1e9
    for (phase, rows_in, rows_out, same_x), has in zip(_matrices(model), targets, strict=True):
        a = layers * ranks * rows_in * size * has
        b = layers * ranks * rows_out * size * has
        flops_a, flops_b = tokens * a, tokens * b
        x = 0 if same_x else layers * tokens * rows_in * size * has
        y, m = layers * tokens * rows_out * size * has, layers * tokens * ranks * size * has
        a_all, b_all = a_all + a, b_all + b
        for s in (RESIDENT, FETCH):
            load[:, s, phase, DEV_F] += (flops_a + flops_b) / device.flops_per_s
            load[:, s, phase, DEV_M] += (a + b) * (1 + (s == FETCH)) / device.memory_bytes_per_s
        load[:, FETCH, phase, TO_DEVICE] += part * (a + b) / link.to_device_bytes_per_s
        load[:, FETCH, phase, NEAR_M] += part * (a + b) / pool.dram_bytes_per_s
        load[:, NEAR, phase, NEAR_F] += part * (flops_a + flops_b) / near_flops_per_s
        load[:, NEAR, phase, NEAR_M] += part * (a + b) / pool.dram_bytes_per_s
        load[:, NEAR, phase, TO_DEVICE] += y / link.to_device_bytes_per_s
        load[:, SPLIT, phase, NEAR_F] += part * flops_a / near_flops_per_s
        load[:, SPLIT, phase, NEAR_M] += part * a / pool.dram_bytes_per_s
        load[:, SPLIT, phase, TO_DEVICE] += m / link.to_device_bytes_per_s
        serial[:, SPLIT, phase] += np.maximum(flops_b / device.flops_per_s, b / device.memory_bytes_per_s)
        for s in (NEAR, SPLIT):
            load[:, s, phase, TO_POOL] += x / link.to_pool_bytes_per_s
    load *= weight[:, None, None, None]
    serial *= weight[:, None, None]

    base = np.zeros((num_phases, d, 6))
    base_bytes = [layers * width * (width + 2 * kv_width), 0, layers * width * width]
    base_bytes += [2 * layers * width * ffn, layers * width * ffn, width * vocabulary]
    base[:, :, DEV_M] = size * np.array(base_bytes)[:, None] / device.memory_bytes_per_s
    base[:, :, DEV_F] = 32 * size * np.array(base_bytes)[:, None] / device.flops_per_s
    call_s = rng.choice([0, 200e-9, 2e-6, 20e-6]) * layers
    fixed, fixed_serial = np.zeros((4, num_phases, 6)), np.zeros((4, num_phases))
    busy = [0, 2, 3, 4]
    fixed_serial[NEAR][busy] = call_s
    fixed_serial[SPLIT][busy] = 1.5 * call_s
    fixed[FETCH][busy, TO_DEVICE] = call_s
    fixed[RESIDENT][busy, DEV_F] = 0.25 * call_s

    kv = _kv(rng, model, device, link, pool, d)
    bytes_ = np.zeros((n, 4))
    bytes_[:, RESIDENT], bytes_[:, SPLIT] = a_all + b_all, b_all
    return _finish(rng, PHASES, groups, shared, load, serial, home, fixed, fixed_serial, base, bytes_, active, kv, link)


def _kv(rng, model, device, link, pool, d):
    layers, width, kv_width = model[:3]
    contexts = rng.integers(*((100, 1024) if rng.random() < 0.5 else (2048, 4096)), 32)
    kv_bytes = float(contexts.sum() * 2 * layers * kv_width * 2)
    spread = rng.dirichlet(np.full(d, 50.0))
    flops = kv_bytes * width / kv_width
    pool_load = np.zeros((2, d, 6))
    pool_load[0, :, TO_DEVICE] = spread * kv_bytes / link.to_device_bytes_per_s
    pool_load[:, :, NEAR_M] = spread * kv_bytes / pool.dram_bytes_per_s
    pool_load[0, :, DEV_M] = 2 * kv_bytes / device.memory_bytes_per_s
    pool_load[1, :, NEAR_F] = spread * flops / (pool.near_flops_per_s or 1e9)
    pool_load[1, :, TO_POOL] = layers * 32 * width * 2 / link.to_pool_bytes_per_s
    pool_load[1, :, TO_DEVICE] = layers * 32 * width * 2 / link.to_device_bytes_per_s
    return KvChoice(
        strategies=("local", "distributed"),
        phase=1,
        device_bytes=kv_bytes,
        device_load_s=np.array([flops / device.flops_per_s, kv_bytes / device.memory_bytes_per_s, 0, 0, 0, 0]),
        pool_load_s=pool_load,
        pool_serial_s=np.array([0.0, layers * rng.choice([0, 400e-9, 5e-6])]),
        current_fraction=float(rng.choice([0.0, 0.1, 1.0])),
        move_s=kv_bytes / link.to_device_bytes_per_s / 1000,
        min_fraction=float(rng.choice([0.0, 0.02])),
    )


def _finish(rng, phases, groups, shared, load, serial, home, fixed, fixed_serial, base, bytes_, active, kv, link):
    """Budget, what is allowed, current state and what moves cost."""
    n = len(home)
    allowed = np.ones((n, 4), bool)
    mood = rng.random()
    if mood < 0.15:
        allowed[:, [NEAR, SPLIT]] = False
    elif mood < 0.3:
        allowed[rng.random(n) < 0.3, RESIDENT] = False
    current = np.full(n, NOWHERE)
    moves = np.zeros((n, 4))
    horizon = rng.choice([64, 1000, 10000])
    if rng.random() < 0.6:
        current = np.where(rng.random(n) < 0.8, rng.integers(0, 4, n), NOWHERE)
        here = np.where(current >= 0, bytes_[np.arange(n), current], 0)
        rate = link.to_device_bytes_per_s if link else 1e9
        moves = np.maximum(0, bytes_ - here[:, None]) / rate / horizon
    need = float(bytes_[:, RESIDENT].sum())
    kv_part = rng.choice([0.0, 0.1, 0.5, 1.1])
    budget = rng.choice([0.0, 0.02, 0.1, 0.3, 0.6, 1.1]) * need + max(kv_part, kv.min_fraction) * kv.device_bytes
    limits = {}
    if rng.random() < 0.2:
        limits = {"adapter_budget_bytes": 0.5 * budget, "kv_budget_bytes": budget}
    if budget > 0 and n > 3 and rng.random() < 0.2:  # pins: the smallest adapters that fit for certain
        row = int(bytes_[:, RESIDENT].argmin())
        if bytes_[row, RESIDENT] <= min(budget - kv.min_fraction * kv.device_bytes, 0.4 * budget):
            allowed[row] = [True, False, False, False]
    return PlanProblem(
        strategies=NAMES,
        phases=phases,
        groups=groups,
        pool_shared=shared,
        load_s=load,
        serial_s=serial,
        home=home,
        fixed_load_s=fixed,
        fixed_serial_s=fixed_serial,
        base_load_s=base,
        base_serial_s=np.zeros(len(phases)),
        device_bytes=bytes_,
        allowed=allowed,
        active=active,
        current=current,
        move_s=moves,
        budget_bytes=float(budget),
        kv=KvChoice(**{**kv.__dict__, **limits}),
    )


def adversarial(rng, n):
    """No structure: lumps, ties, bytes that follow the gains, fixed charges as large as the work."""
    d, num_phases = int(rng.integers(1, 9)), int(rng.integers(1, 8))
    groups, shared = [(APART, False), (GROUPS[1], False), (TOGETHER, True)][rng.integers(3)]
    scale = 1e-3 / n
    size = rng.choice(["even", "lumps", "ties"])
    weight = {"even": rng.random(n), "lumps": rng.pareto(1.5, n) + 0.1, "ties": np.ones(n)}[str(size)]
    takes = rng.random((4, num_phases, 6)) * (rng.random((4, num_phases, 6)) < 0.4)
    load = scale * weight[:, None, None, None] * takes * rng.uniform(0.5, 1.5, (n, 4, 1, 1))
    if size == "even":
        load *= rng.random(load.shape)
    load[:, RESIDENT, :, 2:] = 0
    load[:, FETCH] *= 2
    home = rng.integers(0, d, n)
    if rng.random() < 0.3:
        home[rng.random(n) < 0.5] = STRIPED
    load[home == STRIPED] *= np.where(np.arange(6) < 2, 1.0, 1.0 / d)
    serial = np.zeros((n, 4, num_phases))
    serial[:, SPLIT] = 0.1 * load[:, SPLIT].sum(axis=-1)
    fixed_s = rng.choice([0, 0.02, 0.2]) * 1e-3
    bytes_ = np.zeros((n, 4))
    follow = load[:, FETCH].sum(axis=(1, 2)) / scale if rng.random() < 0.5 else rng.random(n) + 0.1
    bytes_[:, RESIDENT], bytes_[:, SPLIT] = 1e6 * follow, 1e6 * follow * rng.uniform(0.2, 0.8, n)
    base = rng.choice([0, 0.3, 2.0]) * 1e-4 * rng.random((num_phases, d, 6))
    kv_load = rng.choice([0.0, 1.0]) * 1e-4
    kv = KvChoice(
        strategies=("local", "distributed"),
        phase=int(rng.integers(num_phases)),
        device_bytes=float(1e6 * n * rng.choice([0.0, 0.1, 1.0])),
        device_load_s=kv_load * np.array([0.2, 0.5, 0, 0, 0, 0]),
        pool_load_s=kv_load * rng.random((2, d, 6)),
        pool_serial_s=kv_load * rng.random(2),
        current_fraction=float(rng.random()),
        move_s=kv_load * 0.01,
        min_fraction=float(rng.choice([0.0, 0.05])),
    )
    active = rng.random(n) < rng.choice([0.3, 1.0])
    active[0] = True
    fixed, fixed_serial = fixed_s * takes * rng.random((4, 1, 1)), fixed_s * rng.random((4, num_phases)) / num_phases
    phases = tuple(f"phase{i}" for i in range(num_phases))
    return _finish(rng, phases, groups, shared, load, serial, home, fixed, fixed_serial, base, bytes_, active, kv, None)


def random_instance(seed: int, *, n: int | None = None) -> PlanProblem:
    """Two of three are realistic; sizes 10 to 1000 unless `n` is given."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice(SIZES))
    make = adversarial if seed % 3 == 2 else realistic
    return make(rng, size if n is None else n)
