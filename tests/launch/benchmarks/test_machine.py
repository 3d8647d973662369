"""What a report says of the machine."""

from __future__ import annotations

from launch.benchmarks.machine import cpu_name, describe_machine, last_level_cache_bytes


def test_machine_is_named_as_the_system_names_it(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name\t: Fast CPU: 9\n")
    assert cpu_name(file) == "Fast CPU: 9"
    assert cpu_name(tmp_path / "absent")
    machine = describe_machine()
    assert int(machine["cores"]) >= 1
    assert int(machine["memory_bytes"]) > 2**28


def test_last_level_cache_counts_each_shared_cache_once(tmp_path):
    shared = {"index0": ("1", "48K", "{cpu}"), "index3": ("3", "32768K", "{pair}")}
    for cpu in range(4):
        for index, (level, size, cores) in shared.items():
            folder = tmp_path / f"cpu{cpu}" / "cache" / index
            folder.mkdir(parents=True)
            (folder / "level").write_text(level + "\n")
            (folder / "size").write_text(size + "\n")
            (folder / "shared_cpu_list").write_text(cores.format(cpu=cpu, pair="0-1" if cpu < 2 else "2-3") + "\n")
    assert last_level_cache_bytes(tmp_path) == 2 * 32 * 2**20


def test_last_level_cache_that_the_system_does_not_tell_is_none(tmp_path):
    assert last_level_cache_bytes(tmp_path) is None
    (tmp_path / "cpu0" / "cache" / "index0").mkdir(parents=True)
    assert last_level_cache_bytes(tmp_path) is None
