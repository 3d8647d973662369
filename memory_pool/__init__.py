"""Device memory and the pool behind the link: pages, stores, the counted link, eviction."""

from memory_pool.adapter_store import AdapterRows, AdapterStatus, AdapterStore, CapacityError
from memory_pool.eviction import EvictionPolicy, LeastRecentlyUsed
from memory_pool.ledger import Crossing, Ledger, LinkBytes
from memory_pool.link import allocate, device_sharding, one_device_mesh, pool_sharding
from memory_pool.pages import PageAllocator
from memory_pool.raw import from_raw, raw_dtype, to_raw

__all__ = [
    "AdapterRows",
    "AdapterStatus",
    "AdapterStore",
    "CapacityError",
    "Crossing",
    "EvictionPolicy",
    "LeastRecentlyUsed",
    "Ledger",
    "LinkBytes",
    "PageAllocator",
    "allocate",
    "device_sharding",
    "from_raw",
    "one_device_mesh",
    "pool_sharding",
    "raw_dtype",
    "to_raw",
]
