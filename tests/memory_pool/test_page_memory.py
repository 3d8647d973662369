import contextlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from memory_pool import audit, link, one_device_mesh
from memory_pool.layout import PageLayout, whole
from memory_pool.page_memory import COPY_BYTES, PageMemory, copies
from plora_jax.engine.compile import counter

ROOT = Path(__file__).parents[2]
POOL_IDS, DEVICE_IDS = [3, 1, 12, 5, 16, 7, 9, 4, 18, 19, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
MANY = 8


def make_memory(shards=1, *, page_tokens=4, pool_pages=10, num_layers=3, near=True):
    projections = {"q": whole((8, 8))} if shards == 1 else {}
    layout = PageLayout(
        num_layers=num_layers,
        page_tokens=page_tokens,
        kv_heads=1,
        head_dim=8,
        projections=projections,
        dtype=np.dtype(jnp.bfloat16),
    )
    mesh = one_device_mesh() if shards == 1 else Mesh(np.array(jax.devices()[:shards]), (link.TENSOR_AXIS,))
    return PageMemory(layout, mesh, pool_devices=2, pool_pages=pool_pages, adapter_pages=13, kv_pages=14, near=near)


def random_pages(memory, count):
    shape = (memory.pool.shape[0], count, memory.pool.shape[2])
    return np.random.default_rng(count).integers(0, 2**16, shape).astype(np.uint16)


def check_copies_put_pages_where_they_are_sent(memory):
    pages = random_pages(memory, len(POOL_IDS))
    moved = len(POOL_IDS) * memory.page_bytes
    assert memory.write(POOL_IDS, pages) == (0 if memory.near else moved)
    assert memory.load_adapters(DEVICE_IDS, POOL_IDS) == moved
    assert memory.load_kv(DEVICE_IDS[::-1], POOL_IDS) == moved
    assert memory.save_kv([17, 13, 2], [12, 1, 10]) == 3 * memory.page_bytes
    pool, adapters, kv = (np.asarray(a) for a in (memory.pool, memory.adapters, memory.kv))
    np.testing.assert_array_equal(pool[:, POOL_IDS], pages)
    np.testing.assert_array_equal(adapters[:, DEVICE_IDS], pages)
    np.testing.assert_array_equal(kv[:, DEVICE_IDS[::-1]], pages)
    np.testing.assert_array_equal(pool[:, [17, 13, 2]], kv[:, [12, 1, 10]])
    for array, ids in ((pool, [*POOL_IDS, 17, 13, 2]), (adapters, DEVICE_IDS), (kv, DEVICE_IDS)):
        assert not np.delete(array, ids, axis=1).any(), "a page that nobody named was written"


def check_copies_update_in_place(memory):
    before = [buffers(a) for a in (memory.pool, memory.adapters, memory.kv)]
    memory.write(POOL_IDS, random_pages(memory, len(POOL_IDS)))
    memory.load_adapters(DEVICE_IDS, POOL_IDS)
    memory.load_kv(DEVICE_IDS, POOL_IDS)
    memory.save_kv(POOL_IDS, DEVICE_IDS)
    assert [buffers(a) for a in (memory.pool, memory.adapters, memory.kv)] == before
    kinds = [a.sharding.memory_kind for a in (memory.pool, memory.adapters, memory.kv)]
    assert kinds == ["pinned_host", "device", "device"]


def buffers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def check_audit_counts_what_copies_return(memory):
    functions, count = copies(memory.mesh, near=memory.near), 4
    ids = np.arange(1, 1 + count, dtype=np.int32)
    place = link.pool_sharding if memory.near else link.device_sharding
    near = jax.device_put(ids, place(memory.mesh))
    pages = jax.device_put(random_pages(memory, count), place(memory.mesh, PartitionSpec(link.TENSOR_AXIS)))
    written = audit(functions.write, memory.pool, pages, near)
    assert (written.to_device, written.to_pool) == (0, memory.write(ids, np.asarray(pages)))
    control = memory.control_bytes(count)
    loaded = audit(functions.load, memory.adapters, memory.pool, ids, near, control_args=[3])
    assert (loaded.to_device, loaded.to_pool) == (memory.load_adapters(ids, ids), control)
    loaded = audit(functions.load, memory.kv, memory.pool, ids, near, control_args=[3])
    assert (loaded.to_device, loaded.to_pool) == (memory.load_kv(ids, ids), control)
    saved = audit(functions.save, memory.pool, memory.kv, near, ids, control_args=[2])
    assert (saved.to_device, saved.to_pool) == (0, memory.save_kv(ids, ids) + control)


CHECKS = [
    check_copies_put_pages_where_they_are_sent,
    check_copies_update_in_place,
    check_audit_counts_what_copies_return,
]


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_copies_on_one_device(check, near):
    check(make_memory(near=near))


@pytest.mark.parametrize("check", [CHECKS[0], CHECKS[2]], ids=lambda check: check.__name__)
def test_copies_of_an_emulated_pool(check, monkeypatch):
    monkeypatch.setenv("PLORA_POOL", "device")
    memory = make_memory()
    assert memory.pool.sharding.memory_kind == "device"
    check(memory)


def test_kv_pages_that_a_step_took_and_lost_are_replaced_by_empty_ones():
    memory = make_memory()
    assert not memory.kv_is_lost()
    shape, sharding = memory.kv.shape, memory.kv.sharding
    memory.kv.delete()
    assert memory.kv_is_lost()
    memory.renew_kv()
    assert not memory.kv_is_lost()
    assert (memory.kv.shape, memory.kv.sharding) == (shape, sharding)
    memory.load_kv([1], [2])


def test_kv_pages_that_come_of_a_step_that_failed_are_lost():
    def fail(kv):
        raise RuntimeError("in the step")

    memory = make_memory()
    step = jax.jit(lambda kv: jax.pure_callback(fail, jax.ShapeDtypeStruct(kv.shape, kv.dtype), kv), donate_argnums=0)
    # Backends fail when the step is dispatched, or give arrays that nobody can read.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        memory.kv = step(memory.kv)
    assert memory.kv_is_lost()


def test_copies_on_many_devices():
    """In a process of its own: the number of devices is fixed when JAX starts."""
    flags = f"--xla_force_host_platform_device_count={MANY}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.memory_pool.test_page_memory"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [check.__name__ for check in CHECKS]


def test_copies_never_compile_again():
    memory = make_memory()
    before = counter.count
    for count in range(len(POOL_IDS) + 1):
        memory.write(POOL_IDS[:count], random_pages(memory, count))
        memory.load_adapters(DEVICE_IDS[:count], POOL_IDS[:count])
        memory.load_kv(DEVICE_IDS[:count], POOL_IDS[:count])
        memory.save_kv(POOL_IDS[:count], DEVICE_IDS[:count])
    assert counter.count == before


def test_copy_pages_large_pages_are_copied_one_by_one():
    memory = make_memory(page_tokens=1536, pool_pages=2, num_layers=64)
    assert COPY_BYTES // 2 < memory.page_bytes <= COPY_BYTES
    assert memory.copy_pages == 1
    assert make_memory().copy_pages == 8


if __name__ == "__main__":
    for run in CHECKS:
        run(make_memory(MANY))
        run(make_memory(MANY, near=False))
        print(run.__name__)
