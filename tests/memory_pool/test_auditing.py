"""The audit counts what crosses the link, and refuses what touches the pool in any other way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import compute_on
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from memory_pool import (
    AuditError,
    audit,
    device_sharding,
    link,
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
        (lambda pool, x: jax.lax.dynamic_slice(pool, (x[0, 0].astype(int), 0), (1, 8)), "`dynamic_slice` at"),
        (lambda pool, x: jax.lax.dynamic_update_slice(pool, to_pool(x[:1]), (0, 0)), "`dynamic_update_slice` at"),
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
    wrap = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    leak = wrap(lambda p: p * 2.0, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    with pytest.raises(AuditError, match="give results back to the pool"):
        audit(leak, POOL)


SINGLE = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def _branches_that_differ(pool, x):
    with jax.named_scope("lane"):
        return jax.lax.cond(x[0, 0] > 0, lambda: near(pool, x), lambda: to_device(pool)[:3, :4])


def _decided_in_the_pool(pool, x):
    flag = near_data(lambda p: p[0, 0] > 0)(pool)
    return jax.lax.while_loop(lambda s: s[0], lambda s: (s[0], s[1] + 1), (flag, x))


def _condition_that_reads(pool, x):
    with jax.named_scope("lane"):
        return jax.lax.while_loop(lambda s: to_device(shrink(pool, to_pool(s)))[0, 0] < 9, lambda s: s + 1, x)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda pool, x: pool.at[0].add(x[0]), r"`scatter-add` .* touches float32<host>\[4,8\]"),
        (lambda pool, x: pool.at[jnp.int32(1)].get(mode="promise_in_bounds"), "memory"),
        (lambda pool, x: jnp.concatenate([pool, x]), "memory_space of all inputs"),
        (lambda pool, x: jax.debug.callback(lambda: POOL.sum()), "a callback can read pool arrays"),
        (lambda pool, x: jax.debug.print("{}", pool), "a callback can read pool arrays"),
        (lambda pool, x: jax.device_put(x, SINGLE), "which is a NamedSharding"),
        (lambda pool, x: jax.jit(lambda: x * 2, out_shardings=SINGLE)(), "which is a NamedSharding"),
        (lambda pool, x: jax.jit(lambda: x * 2, out_shardings=pool_sharding(MESH))(), "uncounted transfer"),
        (lambda pool, x: jax.lax.with_sharding_constraint(x, pool_sharding(MESH)), "uncounted transfer"),
        (lambda pool, x: near_data(lambda p: jax.device_put(p, jax.memory.Space.Device))(pool), "moves nothing"),
        (lambda pool, x: near_data(lambda p: to_pool(to_device(p)))(pool), "moves nothing"),
        (lambda pool, x: near_data(lambda: X * 2)(), "has captured float32"),
        (_branches_that_differ, "move different amounts"),
        (_decided_in_the_pool, "decided by bool"),
        (_condition_that_reads, "the condition of `while`"),
    ],
)
def test_hidden_violation_is_refused(program, text):
    with pytest.raises(ValueError, match=text):
        audit(program, POOL, X, loop_counts={"lane": 1})


@pytest.mark.skipif(not hasattr(compute_on, "compute_on2"), reason="this JAX has no such context")
def test_host_compute_by_context_is_refused():
    def program(x):
        with compute_on.compute_on("device_host"):
            return x * 2

    with pytest.raises(AuditError, match=r"under the context compute_on\('device_host'\)"):
        audit(program, X)


def test_array_with_a_single_device_sharding_of_the_pool_is_refused_as_an_argument_or_captured():
    stray = jax.device_put(np.ones((4, 8), np.float32), SINGLE)
    with pytest.raises(AuditError, match=r"an argument of shape \(4, 8\) has SingleDeviceSharding"):
        audit(near, stray, X)
    with pytest.raises(AuditError, match="captured by a traced function has SingleDeviceSharding"):
        audit(lambda x: near(stray, x), X)


def test_inner_loop_takes_the_count_of_its_own_scope():
    def program(pool, x, rounds):
        def body(_, total):
            return total + near(pool, x)

        def lane():
            with jax.named_scope("lane.rounds"):
                return jax.lax.fori_loop(0, rounds, body, jnp.zeros((3, 4)))

        with jax.named_scope("lane"):
            return jax.lax.cond(rounds > 0, lane, lambda: jnp.zeros((3, 4)))

    args = (POOL, X, np.int32(2))
    assert audit(program, *args, loop_counts={"lane": 1, "lane.rounds": 2}) == (2 * 48, 2 * 96, 4)
    assert audit(program, *args, loop_counts={"lane": 0, "lane.rounds": 2}) == (0, 0, 0)
    with pytest.raises(AuditError, match=r"under `while` .* have no count"):
        audit(program, *args, loop_counts={"lane": 1})


def test_control_arguments_count_once_on_every_device():
    tables = {"pages": jax.ShapeDtypeStruct((5, 2), np.int32, sharding=pool_sharding(MESH)), "x": X}
    program = near_data(lambda pages: pages + 1)
    assert audit(lambda t: program(t["pages"]), tables) == (0, 0, 0)
    assert audit(lambda t: program(t["pages"]), tables, control_args=(0,)) == (0, 5 * 2 * 4, 1)


def copied(pool, x):
    pool = link.write_block(pool, x[:1], (2, 0))
    rows = jax.lax.map(lambda i: link.read_block(pool, (i, 0), (1, 8)), jnp.arange(3))
    return pool, rows


def test_blocks_that_the_link_copies_are_counted():
    assert audit(copied, POOL, X) == (3 * 8 * 4, 8 * 4, 4)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setenv("PLORA_POOL", "device")
    return jax.device_put(np.ones((4, 8), np.float32), pool_sharding(MESH))


def test_emulated_transfers_are_counted_as_real_ones_are(emulated):
    function = near_data(lambda pool, x: jnp.einsum("PD,TD->TP", pool, x))

    def near(pool, x):
        return to_device(function(pool, to_pool(x)))

    def loop(pool, x):
        return jax.lax.scan(lambda c, _: (c + near(pool, x), None), jnp.zeros((3, 4)), length=5)[0]

    assert audit(near, emulated, X) == (3 * 4 * 4, 3 * 8 * 4, 2)
    assert audit(loop, emulated, X) == (5 * 48, 5 * 96, 10)
    assert audit(copied, emulated, X) == (3 * 8 * 4, 8 * 4, 4)
    assert audit(near, emulated, X, control_args=[1]).to_pool == 2 * 3 * 8 * 4


def test_emulated_transfers_are_named_by_the_link_alone(emulated):
    assert audit(lambda x: checkpoint_name(x, "link.to_pool"), X) == (0, 0, 0)


def test_names_count_for_nothing_where_the_pool_is_real():
    assert audit(lambda x: checkpoint_name(x, "link.to_pool"), X) == (0, 0, 0)
    with pytest.raises(AuditError, match="`name` at"):
        audit(lambda pool: checkpoint_name(pool, "link.to_device"), POOL)
