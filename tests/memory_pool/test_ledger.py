import pytest

from memory_pool import Crossing, Ledger


def test_add_same_crossing_sums_moved_and_useful():
    ledger, crossing = Ledger(), Crossing("adapter", "resident", "to_device", "load")
    ledger.add(crossing, moved_bytes=100, useful_bytes=80)
    ledger.add(crossing, moved_bytes=10, useful_bytes=10)
    ledger.add(crossing._replace(direction="to_pool"), moved_bytes=1, useful_bytes=0)
    assert ledger.totals()[crossing] == (110, 90)
    assert len(ledger.totals()) == 2


def test_add_more_useful_than_moved_is_refused():
    with pytest.raises(AssertionError):
        Ledger().add(Crossing("kv", "local", "to_device", "decode"), moved_bytes=1, useful_bytes=2)
