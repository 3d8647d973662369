import pytest

from memory_pool.ledger import Crossing, Ledger, LinkBytes


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


def test_add_all_counts_each():
    ledger = Ledger()
    kv, control = Crossing("kv", "local", "to_device", "decode"), Crossing("control", "local", "to_pool", "decode")
    ledger.add_all([(kv, LinkBytes(8, 4)), (control, LinkBytes(2, 2)), (kv, LinkBytes(8, 8))])
    assert ledger.totals() == {kv: (16, 12), control: (2, 2)}
