"""The audit counts what crosses the link, and refuses what touches the pool in any other way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from memory_pool import (
    AuditError,
    audit,
    device_sharding,
    near_data,
    one_device_mesh,
    pool_sharding,
    to_device,
    to_pool,
)

MESH = one_device_mesh()
POOL = jax.device_put(np.ones((4, 8), np.float32), pool_sharding(MESH))
X = jax.device_put(np.ones((3, 8), np.float32), device_sharding(MESH))
shrink = near_data(lambda pool, x: jnp.einsum("PD,TD->TP", pool, x))


def near(pool, x):
    return to_device(shrink(pool, to_pool(x)))


def test_near_data_runs_on_the_pool_and_counts_operand_and_result():
    np.testing.assert_array_equal(jax.jit(near)(POOL, X), np.full((3, 4), 8.0))
    assert audit(near, POOL, X) == (3 * 4 * 4, 3 * 8 * 4, 2)


def test_scan_multiplies_and_nested_jit_is_walked():
    def loop(pool, x):
        return jax.lax.scan(lambda c, _: (c + jax.jit(near)(pool, x), None), jnp.zeros((3, 4)), length=5)[0]

    assert audit(loop, POOL, X) == (5 * 48, 5 * 96, 10)


def test_vmap_counts_every_row():
    rows = jax.device_put(np.ones((6, 3, 8), np.float32), device_sharding(MESH))
    assert audit(jax.vmap(lambda x: to_pool(x)), rows).to_pool == 6 * 96


def test_shard_map_counts_all_devices_together():
    if len(jax.devices()) < 2:
        mesh, size = MESH, 1
    else:
        mesh, size = jax.make_mesh((2,), ("tensor",)), 2
    x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, PartitionSpec("tensor"), memory_kind="device"))
    spec = PartitionSpec("tensor")
    sharded = jax.shard_map(to_pool, mesh=mesh, in_specs=spec, out_specs=spec)
    assert audit(sharded, x) == (0, 4 * 8 * 4, size)


def test_cond_without_a_count_is_refused_and_with_one_counted():
    def maybe(pool, x, flag):
        with jax.named_scope("lane"):
            return jax.lax.cond(flag, lambda: near(pool, x), lambda: jnp.zeros((3, 4)))

    with pytest.raises(AuditError, match=r"under `cond` .* have no count"):
        audit(maybe, POOL, X, np.bool_(True))
    assert audit(maybe, POOL, X, np.bool_(True), loop_counts={"lane": 3}) == (144, 288, 6)


def _while(pool, x):
    return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, near(pool, x)), (0, jnp.zeros((3, 4))))


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda pool, x: pool.at[0].set(x[0]), "scatter"),
        (lambda pool, x: jnp.sort(pool, axis=0), "sort"),
        (lambda pool, x: pool * 2.0, "mul"),
        (lambda pool, x: pool[1:], "slice"),
        (lambda pool, x: jax.pure_callback(lambda p: p, jax.ShapeDtypeStruct((4, 8), np.float32), pool), "callback"),
        (lambda pool, x: jax.device_put(x, jax.memory.Space.Host), "outside memory_pool/link.py"),
        (lambda pool, x: jax.device_put(pool, jax.memory.Space.Device), "outside memory_pool/link.py"),
        (lambda pool, x: jnp.einsum("PD,TD->TP", pool, x), "memory"),
        (lambda pool, x: shrink(pool, x), "memory"),
        (lambda pool, x: pool + x[:1], "memory"),
        (lambda pool, x: near_data(lambda p: p + jnp.arange(8.0))(pool), "memory"),
        (_while, r"under `while` .* have no count"),
    ],
)
def test_violation_is_refused_by_the_types_or_by_the_audit(program, text):
    with pytest.raises(ValueError, match=text):
        audit(program, POOL, X)


def test_near_data_result_on_the_device_is_refused():
    from jax.experimental import compute_on

    wrap = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    leak = wrap(lambda p: p * 2.0, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    with pytest.raises(AuditError, match="give results back to the pool"):
        audit(leak, POOL)
