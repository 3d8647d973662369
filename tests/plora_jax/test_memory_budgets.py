import pytest

from memory_pool.link import AllocationError
from plora_jax.engine.engine_config import EngineConfig
from plora_jax.engine.memory_budgets import GB, Room, allocation_problem, memory_problems

CONFIG = EngineConfig(pool_memory_gb=8.0, device_adapter_mb=1024, device_kv_mb=2048)


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (Room(11 * GB, None), []),
        (Room(None, None), []),
        (
            Room(10 * GB, None),
            [
                "--pool_memory_gb 8.0, --device_adapter_mb 1024, --device_kv_mb 2048 ask for 11.0 GB of memory "
                "together, and this machine has 10.0 GB: lower one"
            ],
        ),
        (
            Room(4 * GB, GB),
            [
                "--pool_memory_gb 8.0 asks for 8.0 GB of memory, and this machine has 4.0 GB: lower it",
                "--device_kv_mb 2048 asks for 2.0 GB of memory, and a device has 1.0 GB: lower it",
            ],
        ),
        (Room(8 * GB, 3 * GB), []),
        (
            Room(4 * GB, 10 * GB, pool_on_device=True),
            [
                "--pool_memory_gb 8.0, --device_adapter_mb 1024, --device_kv_mb 2048 ask for 11.0 GB of memory "
                "together, and a device has 10.0 GB: lower one"
            ],
        ),
    ],
)
def test_budgets_beyond_the_memory_are_named_with_what_there_is(room, says):
    assert memory_problems(CONFIG, room) == says


def test_budgets_of_shards_add_up_where_the_device_is_the_machine():
    config = EngineConfig(pool_memory_gb=1.0, device_adapter_mb=1024, device_kv_mb=1024, tensor_parallel_size=4)
    assert memory_problems(config, Room(9 * GB, None)) == []
    assert "ask for 9.0 GB" in memory_problems(config, Room(8 * GB, None))[0]


def test_adapter_budget_without_lora_asks_for_nothing():
    config = EngineConfig(pool_memory_gb=1.0, device_adapter_mb=10**9, device_kv_mb=1024, enable_lora=False)
    assert memory_problems(config, Room(2 * GB, None)) == []


@pytest.mark.parametrize(
    ("in_pool", "pool_on_device", "says"),
    [
        (True, False, "3.0 GB of pool memory could not be had: lower --pool_memory_gb 8.0"),
        (
            False,
            False,
            "3.0 GB of device memory could not be had: lower --device_adapter_mb 1024 or --device_kv_mb 2048",
        ),
        (
            False,
            True,
            "3.0 GB of device memory could not be had: lower --pool_memory_gb 8.0 or --device_adapter_mb 1024 or "
            "--device_kv_mb 2048",
        ),
    ],
)
def test_allocation_that_fails_names_the_flags_of_that_memory(in_pool, pool_on_device, says):
    error = AllocationError(3 * GB, in_pool=in_pool)
    assert allocation_problem(CONFIG, error, pool_on_device=pool_on_device) == says
