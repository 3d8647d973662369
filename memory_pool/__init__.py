"""Device memory and the pool behind the link: pages, stores, the counted link, eviction.

Names are imported when they are first used, so that page allocators and policies can be used without JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memory_pool.adapter_store import AdapterRows, AdapterStatus, AdapterStore, CapacityError
    from memory_pool.auditing import AuditError, LinkTraffic, audit
    from memory_pool.eviction import EvictionPolicy, LeastRecentlyUsed
    from memory_pool.ledger import Crossing, Ledger, LinkBytes
    from memory_pool.link import allocate, device_sharding, one_device_mesh, pool_sharding, to_device, to_pool
    from memory_pool.near import near_data
    from memory_pool.pages import PageAllocator
    from memory_pool.raw import from_raw, raw_dtype, to_raw

_HOMES = {
    "adapter_store": ("AdapterRows", "AdapterStatus", "AdapterStore", "CapacityError"),
    "auditing": ("AuditError", "LinkTraffic", "audit"),
    "eviction": ("EvictionPolicy", "LeastRecentlyUsed"),
    "ledger": ("Crossing", "Ledger", "LinkBytes"),
    "link": ("allocate", "device_sharding", "one_device_mesh", "pool_sharding", "to_device", "to_pool"),
    "near": ("near_data",),
    "pages": ("PageAllocator",),
    "raw": ("from_raw", "raw_dtype", "to_raw"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AdapterRows",
    "AdapterStatus",
    "AdapterStore",
    "AuditError",
    "CapacityError",
    "Crossing",
    "EvictionPolicy",
    "LeastRecentlyUsed",
    "Ledger",
    "LinkBytes",
    "LinkTraffic",
    "PageAllocator",
    "allocate",
    "audit",
    "device_sharding",
    "from_raw",
    "near_data",
    "one_device_mesh",
    "pool_sharding",
    "raw_dtype",
    "to_device",
    "to_pool",
    "to_raw",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'memory_pool' has no attribute {name!r}")
    return getattr(importlib.import_module(f"memory_pool.{_HOME_OF[name]}"), name)
