"""Freed memory that is used again: large arrays cost page faults once, not each time."""

import platform
import resource
import subprocess
import sys

import pytest

from memory_pool import heap

PROGRAM = """
import resource, sys
import numpy as np
from memory_pool.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(40 << 20, np.uint8)  # above what the C library takes from its heap by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
kept = keep_freed_memory()
faults()
print(usual, kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a C library without such settings")
def test_arrays_that_come_and_go_cost_page_faults_once():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    usual, kept, after = ran.stdout.split()
    assert kept == "True"
    assert int(after) < 20 * (40 << 20) / resource.getpagesize() / 10
    assert int(after) < int(usual) / 10 or int(usual) < 1000, "huge pages make few faults either way"


def test_a_c_library_without_such_settings_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    assert not heap.keep_freed_memory()
