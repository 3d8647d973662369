from memory_pool import LeastRecentlyUsed


def test_order_puts_the_longest_unused_first_and_unknown_before_all():
    policy = LeastRecentlyUsed()
    for key in (1, 2, 3, 1):
        policy.touch(key)
    assert policy.order([1, 2, 3, 9]) == [9, 2, 3, 1]


def test_forget_makes_a_key_unknown():
    policy = LeastRecentlyUsed()
    policy.touch(1)
    policy.touch(2)
    policy.forget(2)
    assert policy.order([1, 2]) == [2, 1]
