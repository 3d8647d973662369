"""Hardware specs: the paper's figures, what --link and --hardware take, and files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from memory_pool.hardware import (
    DEVICES,
    HARDWARE,
    LINKS,
    POOL_DEVICES,
    DeviceSpec,
    HardwareError,
    LinkSpec,
    hardware_from_json,
    parse_hardware,
    parse_link,
    save_hardware,
)


def test_plain_read_of_256_kb_takes_the_papers_2369_ns():
    assert parse_hardware("paper").plain_read_s(256 * 1024) == pytest.approx(2369e-9, abs=0.5e-9)
    # The latency of the link belongs to the read-compute path.
    slow = dataclasses.replace(HARDWARE["paper"], link=parse_link("128:900"))
    assert slow.plain_read_s(256 * 1024) == HARDWARE["paper"].plain_read_s(256 * 1024)


def test_paper_preset_is_the_papers_machine():
    paper = HARDWARE["paper"]
    assert (paper.device.flops_per_s, paper.device.memory_bytes_per_s, paper.device.memory_bytes) == (
        989e12,
        3350e9,
        80e9,
    )
    assert paper.num_pool_devices == 4
    assert (paper.pool_device.dram_bytes_per_s, paper.pool_device.near_flops_per_s) == (8 * 136e9, 2e12)
    assert (paper.pool_device.capacity_bytes, paper.pool_device.buffer_bytes) == (512e9, 3 * 2**20)
    assert paper.link.full_duplex
    assert paper.link.to_device_bytes_per_s == paper.link.to_pool_bytes_per_s == 128e9
    assert paper.link.latency_s == pytest.approx(200e-9)
    assert not paper.shared


def test_presets_hold_the_published_figures_and_say_their_source():
    devices = {name: (d.flops_per_s, d.memory_bytes_per_s, d.memory_bytes) for name, d in DEVICES.items()}
    assert devices["a100-pcie"] == (312e12, 1935e9, 80e9)
    assert devices["a100"] == (312e12, 2039e9, 80e9)
    assert devices["h200"] == (989e12, 4800e9, 141e9)
    assert devices["b200"] == (2250e12, 8000e9, 180e9)
    assert devices["tpu-v5e"] == (197e12, 819e9, 16e9)
    assert devices["tpu-v5p"] == (459e12, 2765e9, 95e9)
    assert devices["tpu-v6e"] == (918e12, 1638e9, 32e9)
    rates = {name: link.to_device_bytes_per_s / 1e9 for name, link in LINKS.items()}
    assert [rates[f"pcie{n}"] for n in (4, 5, 6, 7)] == [31.5, 63, 121, 242]
    assert [rates[f"cxl{n}"] for n in (2, 3, 4)] == [63, 121, 242]
    assert (rates["nvlink4"], rates["nvlink5"], rates["c2c"]) == (450, 900, 450)
    measured = LINKS["c2c-measured"]
    assert (measured.to_device_bytes_per_s, measured.to_pool_bytes_per_s) == (375e9, 297e9)
    pools = {name: (p.dram_bytes_per_s, p.near_flops_per_s) for name, p in POOL_DEVICES.items()}
    assert pools["monde"] == (512e9, 2.05e12)
    assert pools["karat"] == (1.2e12, 125e12)
    assert pools["attacc"][0] == 6e12
    assert pools["cpu"] == (100e9, 200e9)
    for table in (DEVICES, LINKS, POOL_DEVICES):
        assert all(spec.source for spec in table.values())


def test_cpu_preset_shares_cores_and_memory_between_device_and_pool():
    assert HARDWARE["cpu"].shared == {"cores", "memory"}
    assert [name for name, hardware in HARDWARE.items() if hardware.shared] == ["cpu"]


def test_parse_link_takes_rate_and_latency():
    assert parse_link("pcie5") is LINKS["pcie5"]
    given = parse_link("37.5:450")
    assert (given.to_device_bytes_per_s, given.to_pool_bytes_per_s, given.full_duplex) == (37.5e9, 37.5e9, True)
    assert given.latency_s == pytest.approx(450e-9)


@pytest.mark.parametrize("text", ["", "pcie9", "128", "128:", ":200", "0:200", "128:-1", "nan:1", "inf:1", "1:2:3"])
def test_parse_link_that_is_not_known_lists_what_is(text):
    with pytest.raises(HardwareError) as caught:
        parse_link(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "pcie4" in message
    assert "such as 128:200" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", HARDWARE)
def test_hardware_survives_its_file(name, tmp_path):
    path = tmp_path / "calibration.json"
    hardware = dataclasses.replace(
        HARDWARE[name], device=dataclasses.replace(HARDWARE[name].device, flops_by_dtype={"float32": 67e12})
    )
    save_hardware(hardware, path)
    assert parse_hardware(str(path)) == hardware


def test_flops_by_dtype_stand_over_the_one_figure():
    device = DeviceSpec(flops_per_s=8.0, memory_bytes_per_s=1, memory_bytes=1, flops_by_dtype={"float32": 2.0})
    assert (device.flops("float32"), device.flops("bfloat16")) == (2.0, 8.0)


def test_hardware_file_may_name_presets(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(
        '{"name": "mine", "device": "h100", "link": "64:300", "pool_device": "paper", "num_pool_devices": 8}'
    )
    mine = parse_hardware(str(path))
    assert (mine.device, mine.pool_device, mine.num_pool_devices) == (DEVICES["h100"], POOL_DEVICES["paper"], 8)
    assert mine.link == parse_link("64:300")


def test_parse_hardware_that_is_not_known_lists_what_is():
    with pytest.raises(HardwareError) as caught:
        parse_hardware("h1000")
    assert str(caught.value) == (
        "hardware 'h1000' is unknown: choose " + ", ".join(HARDWARE) + ", or the path of a JSON file"
    )


def changed(**values: object) -> dict[str, object]:
    return {**HARDWARE["paper"].to_json(), **values}


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in changed().items() if key != name}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (without("link"), "hardware lacks link: it has name, device, link, pool_device at least"),
        (changed(links=1), "hardware has links, which is unknown: allowed are name, device, link,"),
        (changed(device="h1000"), "device 'h1000' is unknown: choose h100, a100,"),
        (changed(device=3), "device must be an object with flops_per_s,"),
        (changed(link="fast"), "link 'fast' is unknown"),
        (changed(link={"latency_s": 1}), "link lacks to_device_bytes_per_s, to_pool_bytes_per_s"),
        (changed(pool_device={"dram_bytes_per_s": -1, "near_flops_per_s": 0}), "dram_bytes_per_s -1 of a PoolDevice"),
        (changed(num_pool_devices=0), "num_pool_devices 0 must be a whole number of at least 1"),
        (changed(shared=["cores", "disk"]), "shared disk is unknown: choose from cores, memory"),
        (changed(commands={"command": 1}), "commands has command, which is unknown: allowed are command_s,"),
        (changed(commands="none"), "commands must be an object with command_s,"),
        ([], "hardware must be an object with name,"),
    ],
)
def test_hardware_file_that_cannot_be_says_what_is_wrong_in_one_line(values, says, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(HardwareError) as caught:
        parse_hardware(str(path))
    assert str(caught.value).startswith(f"hardware file {path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hardware_file_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(HardwareError, match=r"hardware file .*bad\.json: "):
        parse_hardware(str(path))


def test_figures_that_cannot_be_are_refused():
    with pytest.raises(HardwareError, match="latency_s -1 of a LinkSpec must be a finite number, 0 or more"):
        LinkSpec(to_device_bytes_per_s=1, to_pool_bytes_per_s=1, latency_s=-1)
    with pytest.raises(HardwareError, match="memory_bytes True of a DeviceSpec must be a finite number, above 0"):
        DeviceSpec(flops_per_s=1, memory_bytes_per_s=1, memory_bytes=True)


def test_json_of_hardware_needs_no_file():
    assert hardware_from_json(HARDWARE["gh200"].to_json()) == HARDWARE["gh200"]


def test_hardware_is_known_without_jax():
    code = "import sys, memory_pool.hardware; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
