"""Device memory and the pool behind the link: pages, stores, the counted link, eviction, hardware as numbers.

Names are imported when they are first used, so that page allocators and policies can be used without JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memory_pool.adapter_pool import AdapterFacts, AdapterPool, AdapterStatus, CapacityError, Needs, PlacedAdapter
    from memory_pool.auditing import AuditedProgram, AuditError, LinkTraffic, audit
    from memory_pool.eviction import EvictionPolicy, LeastRecentlyUsed
    from memory_pool.hardware import HardwareSpec, LinkSpec, parse_hardware, parse_link
    from memory_pool.kv_pool import KvHandle, KvPool
    from memory_pool.layout import Cut, PageLayout, whole
    from memory_pool.ledger import Crossing, Ledger, LinkBytes
    from memory_pool.link import (
        allocate,
        device_sharding,
        one_device_mesh,
        pool_sharding,
        store_in_pool,
        to_device,
        to_pool,
    )
    from memory_pool.near import near_data
    from memory_pool.page_memory import PageMemory
    from memory_pool.pages import PageAllocator
    from memory_pool.pool_pages import PoolPages
    from memory_pool.probe import ProbeReport
    from memory_pool.raw import from_raw, raw_dtype, recast, to_raw

_HOMES = {
    "adapter_pool": (
        "AdapterFacts",
        "AdapterPool",
        "AdapterStatus",
        "CapacityError",
        "Needs",
        "PlacedAdapter",
    ),
    "auditing": (
        "AuditedProgram",
        "AuditError",
        "LinkTraffic",
        "audit",
    ),
    "eviction": (
        "EvictionPolicy",
        "LeastRecentlyUsed",
    ),
    "hardware": (
        "HardwareSpec",
        "LinkSpec",
        "parse_hardware",
        "parse_link",
    ),
    "kv_pool": (
        "KvHandle",
        "KvPool",
    ),
    "layout": (
        "Cut",
        "PageLayout",
        "whole",
    ),
    "ledger": (
        "Crossing",
        "Ledger",
        "LinkBytes",
    ),
    "link": (
        "allocate",
        "device_sharding",
        "one_device_mesh",
        "pool_sharding",
        "store_in_pool",
        "to_device",
        "to_pool",
    ),
    "near": ("near_data",),
    "page_memory": ("PageMemory",),
    "pages": ("PageAllocator",),
    "pool_pages": ("PoolPages",),
    "probe": ("ProbeReport",),
    "raw": (
        "from_raw",
        "raw_dtype",
        "recast",
        "to_raw",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AdapterFacts",
    "AdapterPool",
    "AdapterStatus",
    "AuditError",
    "AuditedProgram",
    "CapacityError",
    "Crossing",
    "Cut",
    "EvictionPolicy",
    "HardwareSpec",
    "KvHandle",
    "KvPool",
    "LeastRecentlyUsed",
    "Ledger",
    "LinkBytes",
    "LinkSpec",
    "LinkTraffic",
    "Needs",
    "PageAllocator",
    "PageLayout",
    "PageMemory",
    "PlacedAdapter",
    "PoolPages",
    "ProbeReport",
    "allocate",
    "audit",
    "device_sharding",
    "from_raw",
    "near_data",
    "one_device_mesh",
    "parse_hardware",
    "parse_link",
    "pool_sharding",
    "raw_dtype",
    "recast",
    "store_in_pool",
    "to_device",
    "to_pool",
    "to_raw",
    "whole",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'memory_pool' has no attribute {name!r}")
    return getattr(importlib.import_module(f"memory_pool.{_HOME_OF[name]}"), name)
