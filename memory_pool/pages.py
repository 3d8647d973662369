"""Which pages of a page space are taken, and by how many holders.

An allocator knows page numbers only: what a page holds (KV of a sequence, a rank component of an adapter) and where it
lies is known by its owner. Plain Python; every operation costs O(1) a page.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Gives out page numbers and counts references to them.

    Pages below `reserved` are never given out: rows that only fill up a bucket read and write them.

    Args:
        num_pages: pages of the space, the reserved ones included.
        reserved: pages at the start that are never given out.

    Raises:
        ValueError: nothing is left to give out.
    """

    def __init__(self, num_pages: int, reserved: int = 1) -> None:
        if reserved < 0 or num_pages <= reserved:
            raise ValueError(f"a page space of {num_pages} pages, {reserved} of them reserved, has none to give out")
        self._reserved = reserved
        self._references = [0] * num_pages
        # A stack: the page freed last is given out first, while it is still in a cache. Low numbers go out first.
        self._free = list(range(num_pages - 1, reserved - 1, -1))

    @property
    def num_total(self) -> int:
        """All pages, the reserved ones included."""
        return len(self._references)

    @property
    def num_usable(self) -> int:
        """Pages that can be given out, free or not."""
        return len(self._references) - self._reserved

    @property
    def num_free(self) -> int:
        """Pages that can be given out now."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many holders a page has; 0 where it is free or reserved."""
        return self._references[page]

    def can_alloc(self, n: int) -> bool:
        """Whether `alloc(n)` would succeed. Does not mutate."""
        return n <= len(self._free)

    def alloc(self, n: int) -> list[int]:
        """Takes n pages, each with one reference; cannot fail after `can_alloc(n)`.

        Returns:
            Page numbers, lowest first: what lies in neighbours is read faster. Their content is undefined.
        """
        assert 0 <= n <= len(self._free), f"{n} pages asked for, {len(self._free)} free: call can_alloc first"
        pages = sorted(self._free.pop() for _ in range(n))
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page; all must be taken."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is retained but nobody holds it"
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Gives back one reference to each page; one without references can be given out again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is freed but nobody holds it"
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is either free or referenced, and the reserved ones neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page, references in enumerate(self._references):
            assert references >= 0, f"page {page} has {references} references"
            if page < self._reserved:
                assert page not in free, f"reserved page {page} was freed"
                assert not references, f"reserved page {page} was given out"
            else:
                assert (page in free) == (references == 0), f"page {page} has {references} references"
