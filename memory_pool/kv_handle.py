"""The page tables of one sequence's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ABSENT = -1
"""In a page table: this page is not in the memory that the table is for."""


class KvHandle:
    """Where the pages of one sequence are. Changed by `KvPool` only.

    Attributes:
        computed: tokens whose keys and values are there.
        written: tokens, from the start, whose keys and values are in the pool.
        ready: tokens up to this one, from those computed on, may be written to its device pages.
        num_pages: pages that it has.
        num_absent: of these, how many are not on the device.
        suspended: it is not being computed; all its device pages are copies.
    """

    def __init__(self) -> None:
        self.computed = self.written = self.ready = self.num_pages = self.num_absent = 0
        self.suspended = False
        # Rows: pool pages, device pages, pool pages of what is not on the device.
        self._tables = np.full((3, 8), ABSENT, np.int32)

    def home_table(self) -> np.ndarray:
        """[P] int32: pool page of each page in order of position. Valid until the handle changes, as the others."""
        return self._tables[0, : self.num_pages]

    def device_table(self) -> np.ndarray:
        """[P] int32: device page of each page, ABSENT where there is none."""
        return self._tables[1, : self.num_pages]

    def pool_table(self) -> np.ndarray:
        """[P] int32: pool page of each page that is not on the device, ABSENT for the others."""
        return self._tables[2, : self.num_pages]

    def _begin(self, homes: Sequence[int]) -> None:
        stop = self.num_pages + len(homes)
        if stop > self._tables.shape[1]:
            more = np.full((3, max(stop, self._tables.shape[1])), ABSENT, np.int32)
            self._tables = np.concatenate([self._tables, more], axis=1)
        self._tables[0, self.num_pages : stop] = self._tables[2, self.num_pages : stop] = homes
        self._tables[1, self.num_pages : stop] = ABSENT
        self.num_pages, self.num_absent = stop, self.num_absent + len(homes)

    def _end(self, pages: int) -> None:
        """Has no pages from index `pages` on."""
        if pages < self.num_pages:
            self.num_pages = pages
            self.num_absent = int(np.count_nonzero(self.device_table() == ABSENT))

    def _place(self, index: int, device: int) -> None:
        """Has the page on a device page, or not on the device."""
        self.num_absent += (device == ABSENT) - (int(self._tables[1, index]) == ABSENT)
        self._tables[1, index] = device
        self._tables[2, index] = self._tables[0, index] if device == ABSENT else ABSENT
