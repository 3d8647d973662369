"""Every LoRA kernel against plain numpy, over random ranks, dtypes, owners and batch sizes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool import AdapterRows
from strategies import BASE, CHUNK_ROWS, NOBODY, Kernel, LoraLane, choose_kernels, describe_kernels
from strategies import kernels as kernels_module
from strategies.kernels import DECODE_LORA
from strategies.native import build as native_build

KERNELS = [k for k in DECODE_LORA["cpu"] if k.unsupported() is None]
LAYERS = 2
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def make_case(seed, *, ranks, tokens, width_in, widths_out, dtype):
    """Random rows in scattered slots, and the lane that names them."""
    rng = np.random.default_rng(seed)
    total = sum(ranks)
    num_slots = total + 5
    slots = rng.permutation(np.arange(1, num_slots))[:total].astype(np.int32)
    rows, plain = {}, {}
    for name, width_out in widths_out.items():
        a, b = (rng.normal(size=(LAYERS, num_slots, w)).astype(dtype) for w in (width_in, width_out))
        scale = rng.uniform(0.5, 2, size=(LAYERS, num_slots)).astype(np.float32)
        raw = np.uint16 if dtype == ml_dtypes.bfloat16 else np.uint32
        rows[name] = AdapterRows(jnp.asarray(a.view(raw)), jnp.asarray(b.view(raw)), jnp.asarray(scale))
        plain[name] = (a.astype(np.float64), b.astype(np.float64), scale)
    owner = rng.integers(BASE, len(ranks), size=tokens).astype(np.int32) if ranks else np.full(tokens, BASE, np.int32)
    chunks = -(-total // CHUNK_ROWS)
    lane_slots = np.zeros(max(chunks, 1) * CHUNK_ROWS, np.int32)
    lane_owner = np.full(lane_slots.shape, NOBODY, np.int32)
    lane_slots[:total] = slots
    lane_owner[:total] = np.repeat(np.arange(len(ranks)), ranks)
    x = rng.normal(size=(tokens, width_in)).astype(dtype)
    return x, rows, plain, LoraLane(owner, lane_slots, lane_owner, np.int32(chunks))


def reference(x, plain, layer, lane):
    out = {}
    for name, (a, b, scale) in plain.items():
        y = np.zeros((len(x), b.shape[-1]))
        for t, owner in enumerate(lane.owner):
            for slot in lane.slots[lane.slot_owner == owner] if owner != BASE else ():
                y[t] += scale[layer, slot] * (x[t].astype(np.float64) @ a[layer, slot]) * b[layer, slot]
        out[name] = y
    return out


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.lists(st.integers(1, 70), max_size=5),
    tokens=st.sampled_from([1, 8, 19]),
    width_in=st.sampled_from([16, 40, 72]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_lora_kernel_any_mix_equals_numpy(kernel, seed, ranks, tokens, width_in, dtype):
    x, rows, plain, lane = make_case(
        seed, ranks=ranks, tokens=tokens, width_in=width_in, widths_out={"q": 24, "k": 9}, dtype=np.dtype(dtype)
    )
    got = kernel.call(jnp.asarray(x), rows, jnp.int32(1), lane)
    for name, want in reference(x, plain, 1, lane).items():
        bound = TOLERANCE[dtype] * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got[name], want, atol=bound, err_msg=name)
        assert not np.asarray(got[name])[lane.owner == BASE].any(), "the base model's tokens must get exact zeros"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_lora_kernel_same_row_elsewhere_is_bit_equal(kernel):
    x, rows, _, lane = make_case(
        3, ranks=[5, 64, 33], tokens=16, width_in=64, widths_out={"q": 48}, dtype=np.dtype(np.float32)
    )
    order = np.random.default_rng(1).permutation(16)
    run = jax.jit(kernel.call)
    straight = run(x, rows, jnp.int32(0), lane)["q"]
    shuffled = run(x[order], rows, jnp.int32(0), lane._replace(owner=lane.owner[order]))["q"]
    np.testing.assert_array_equal(np.asarray(straight)[order], np.asarray(shuffled))


def test_kernel_table_on_this_machine_ends_with_the_reference():
    assert DECODE_LORA["cpu"][-1].name == "xla"
    assert DECODE_LORA["cpu"][-1].unsupported() is None


def test_choose_kernels_without_the_native_ones_says_why(monkeypatch):
    monkeypatch.setattr(native_build, "unavailable", lambda: "no C++ compiler (g++ or clang++) was found")
    table = (Kernel("native", None, lambda: native_build.unavailable()), DECODE_LORA["cpu"][-1])
    monkeypatch.setattr(kernels_module, "DECODE_LORA", {"cpu": table})
    chosen = choose_kernels("cpu")
    assert chosen.decode.lora.name == "xla"
    assert "decode lora xla" in describe_kernels(chosen, "cpu")
    assert describe_kernels(chosen, "cpu").endswith("(no native: no C++ compiler (g++ or clang++) was found)")
