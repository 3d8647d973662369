"""What a report says of the machine."""

from __future__ import annotations

from launch.benchmarks.machine import cpu_name, describe_machine


def test_machine_is_named_as_the_system_names_it(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel name\t: Fast CPU: 9\n")
    assert cpu_name(file) == "Fast CPU: 9"
    assert cpu_name(tmp_path / "absent")
    machine = describe_machine()
    assert int(machine["cores"]) >= 1
    assert int(machine["memory_bytes"]) > 2**28
