"""Which pages of the pool are taken: one page space for KV and adapters, over all pool devices.

Pages are numbered through all devices: device d owns [d * P, (d + 1) * P) and its first page is reserved. An owner
either asks for pages on one device, or takes them wherever most room is. Plain Python.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from memory_pool.pages import PageAllocator


class PoolPages:
    """Gives out pages of the pool and counts references to them.

    Pages may be given back from any thread; they are taken by the engine's alone, so what `can_alloc` says holds until
    it takes some.

    Args:
        num_devices: pool devices.
        pages_per_device: P, the reserved page included.

    Raises:
        ValueError: no device, or no page to give out on each.
    """

    def __init__(self, num_devices: int, pages_per_device: int) -> None:
        if num_devices < 1:
            raise ValueError(f"a pool needs at least one device, got {num_devices}")
        self._devices = [PageAllocator(pages_per_device) for _ in range(num_devices)]
        self._per_device = pages_per_device
        self._lock = threading.Lock()

    @property
    def num_devices(self) -> int:
        return len(self._devices)

    @property
    def num_usable(self) -> int:
        """Pages that can be given out, free or not."""
        return sum(d.num_usable for d in self._devices)

    @property
    def usable_per_device(self) -> int:
        """Pages of one device that can be given out, free or not."""
        return self._devices[0].num_usable

    @property
    def num_free(self) -> int:
        """Pages that can be given out now."""
        return sum(self.free_by_device)

    @property
    def free_by_device(self) -> list[int]:
        """Pages that can be given out now, by pool device."""
        with self._lock:
            return [d.num_free for d in self._devices]

    def device_of(self, page: int) -> int:
        """The pool device that owns a page."""
        return page // self._per_device

    def references(self, page: int) -> int:
        """How many holders a page has; 0 where it is free or reserved."""
        device, local = divmod(page, self._per_device)
        with self._lock:
            return self._devices[device].references(local)

    def roomiest(self) -> int:
        """The pool device with most free pages; the first of them."""
        free = self.free_by_device
        return free.index(max(free))

    def can_alloc(self, n: int, *, device: int | None = None, keep_free: int = 0) -> bool:
        """Whether `alloc(n, device=device)` would succeed and leave `keep_free` pages free. Does not mutate."""
        free = self.free_by_device
        return n <= (sum(free) if device is None else free[device]) and n + keep_free <= sum(free)

    def alloc(self, n: int, *, device: int | None = None) -> list[int]:
        """Takes n pages, each with one reference; cannot fail after `can_alloc(n, device=device)`.

        Args:
            n: pages.
            device: pool device to take all of them from; None spreads them, each from the device with most room.

        Returns:
            Page numbers; their content is undefined.
        """
        with self._lock:
            homes = self._spread(n) if device is None else [device] * n
            taken = {home: iter(self._devices[home].alloc(count)) for home, count in Counter(homes).items()}
            return [home * self._per_device + next(taken[home]) for home in homes]

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page; all must be taken."""
        with self._lock:
            for page in pages:
                device, local = divmod(page, self._per_device)
                self._devices[device].retain([local])

    def free(self, pages: Iterable[int]) -> None:
        """Gives back one reference to each page; one without references can be given out again."""
        with self._lock:
            for page in pages:
                device, local = divmod(page, self._per_device)
                self._devices[device].free([local])

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is either free or referenced, and the reserved ones neither."""
        with self._lock:
            for device in self._devices:
                device.check_integrity()

    def _spread(self, n: int) -> list[int]:
        free = [d.num_free for d in self._devices]
        assert n <= sum(free), f"{n} pages asked for, {sum(free)} free: call can_alloc first"
        homes = []
        for _ in range(n):
            home = free.index(max(free))
            free[home] -= 1
            homes.append(home)
        return homes
