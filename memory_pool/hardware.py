"""Hardware as numbers: accelerators, links, pool devices, and a whole machine made of them. Plain Python.

    parse_hardware("paper")                      a preset
    parse_hardware("calibration.json")           measured figures, or presets put together another way
    parse_link("cxl3"), parse_link("128:200")    a preset, or GB/s per direction and nanoseconds

Cost models and planners take these; nothing here is measured but what a file has under "calibration". A file holds a
HardwareSpec as JSON, every figure in SI units under the name of its field; a part may also be the name of a preset:

    {"name": "mine", "device": "h100", "link": "128:200", "pool_device": "paper", "num_pool_devices": 8}

Sources: "paper" is arXiv 2608.05483; vendors' figures are dense 16-bit rates and memory as their data sheets have them;
what is assumed says so in its `source`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from memory_pool.calibration import Calibration, calibration_from_json
from memory_pool.figures import HardwareError, check_figures, checked_fields

_T = TypeVar("_T")

GIGA, TERA = 1e9, 1e12
CORES, MEMORY = "cores", "memory"
SHAREABLE = (CORES, MEMORY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """An accelerator.

    Attributes:
        flops_per_s: FLOP/s of matrix products in 16 bits.
        memory_bytes_per_s: what its memory gives.
        memory_bytes: how much it has.
        flops_by_dtype: FLOP/s by dtype name where they differ from `flops_per_s`.
        source: of the figures.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    flops_by_dtype: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        check_figures(self, positive=("flops_per_s", "memory_bytes_per_s", "memory_bytes"))

    def flops(self, dtype: str) -> float:
        """FLOP/s for a dtype such as "float32"."""
        return self.flops_by_dtype.get(dtype, self.flops_per_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """The link of one pool device.

    Attributes:
        to_device_bytes_per_s: from the pool.
        to_pool_bytes_per_s: to the pool.
        latency_s: L, one way.
        full_duplex: both directions at full speed at the same time.
        source: of the figures.
    """

    to_device_bytes_per_s: float
    to_pool_bytes_per_s: float
    latency_s: float
    full_duplex: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        check_figures(self, positive=("to_device_bytes_per_s", "to_pool_bytes_per_s"), not_negative=("latency_s",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolDeviceSpec:
    """One memory device of the pool and its near-data compute.

    Attributes:
        dram_bytes_per_s: what its memory gives to its own compute.
        near_flops_per_s: FLOP/s near the data in 16 bits; 0 where there is no near-data compute.
        capacity_bytes: memory; None where the source states none.
        buffer_bytes: on-chip buffer of the near-data compute; None where the source states none.
        source: of the figures.
    """

    dram_bytes_per_s: float
    near_flops_per_s: float
    capacity_bytes: float | None = None
    buffer_bytes: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        sizes = tuple(name for name in ("capacity_bytes", "buffer_bytes") if getattr(self, name) is not None)
        check_figures(self, positive=("dram_bytes_per_s", *sizes), not_negative=("near_flops_per_s",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLatencies:
    """Fixed times on a command's way to the pool's DRAM; the paper's by default.

    Attributes:
        command_s: the command crosses.
        decode_s: the pool device decodes it.
        controller_s: from the decoder to the DRAM.
        dram_read_s: the DRAM begins to read.
        dram_write_s: the DRAM begins to write.
    """

    command_s: float = 30e-9
    decode_s: float = 10e-9
    controller_s: float = 10e-9
    dram_read_s: float = 30e-9
    dram_write_s: float = 40e-9

    def __post_init__(self) -> None:
        check_figures(self, not_negative=tuple(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """A machine: one accelerator and its pool.

    Attributes:
        name: for reports.
        device: the accelerator.
        link: of each pool device.
        pool_device: each of them.
        num_pool_devices: how many there are.
        shared: of SHAREABLE, what device and pool are one and the same of. Where they share cores, the compute of the
            device and near the data add up instead of running at once; where they share memory, its reads do.
        commands: fixed times of the read path.
        calibration: what the functions of a step were measured to take, if they were.
    """

    name: str
    device: DeviceSpec
    link: LinkSpec
    pool_device: PoolDeviceSpec
    num_pool_devices: int = 1
    shared: frozenset[str] = frozenset()
    commands: CommandLatencies = CommandLatencies()
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_pool_devices, int) or self.num_pool_devices < 1:
            raise HardwareError(f"num_pool_devices {self.num_pool_devices!r} must be a whole number of at least 1")
        if unknown := sorted(self.shared - set(SHAREABLE)):
            raise HardwareError(f"shared {', '.join(unknown)} is unknown: choose from {', '.join(SHAREABLE)}")

    def plain_read_s(self, num_bytes: float) -> float:
        """Seconds for the device to read bytes of one pool device that does nothing else.

        Source: the paper; 256 KB at 1088 and 128 GB/s take 2369 ns. The link's latency is that of the read-compute
        path, and is not in it.
        """
        fixed = self.commands
        fixed_s = fixed.command_s + fixed.decode_s + fixed.controller_s + fixed.dram_read_s
        moving_s = num_bytes / self.pool_device.dram_bytes_per_s + num_bytes / self.link.to_device_bytes_per_s
        return fixed_s + moving_s

    def to_json(self) -> dict[str, Any]:
        """Plain values that `hardware_from_json` takes."""
        values = {**dataclasses.asdict(self), "shared": sorted(self.shared)}
        if self.calibration is None:
            del values["calibration"]
        return values


def _device(teraflops: float, gb_per_s: float, gb: float, source: str = "vendor's data sheet") -> DeviceSpec:
    return DeviceSpec(
        flops_per_s=teraflops * TERA, memory_bytes_per_s=gb_per_s * GIGA, memory_bytes=gb * GIGA, source=source
    )


def _link(gb_per_s: float, latency_ns: float, source: str, *, full_duplex: bool = True) -> LinkSpec:
    rate = gb_per_s * GIGA
    return LinkSpec(
        to_device_bytes_per_s=rate,
        to_pool_bytes_per_s=rate,
        latency_s=latency_ns / GIGA,
        full_duplex=full_duplex,
        source=source,
    )


_PCIE = "x16, nominal; latency of about 0.5 us as a small DMA read takes (Neugebauer et al., SIGCOMM 2018)"
_CXL = "rate of the PCIe generation it runs on; latency at the low end of the 200 to 600 ns reported, as in the paper"
_NVLINK = "nominal; latency assumed to be the paper's 200 ns"
_NOT_STATED = "; capacity and buffer not stated"

DEVICES: Mapping[str, DeviceSpec] = {
    "h100": _device(989, 3350, 80, "paper; H100 SXM"),
    "a100": _device(312, 2039, 80, "vendor's data sheet, A100-80 SXM"),
    "a100-pcie": _device(312, 1935, 80, "vendor's data sheet, A100-80 PCIe; the paper's formulas are checked with it"),
    "h200": _device(989, 4800, 141),
    "b200": _device(2250, 8000, 180),
    "gh200": _device(989, 4000, 96, "vendor's data sheet, HBM3 version"),
    "tpu-v5e": _device(197, 819, 16),
    "tpu-v5p": _device(459, 2765, 95),
    "tpu-v6e": _device(918, 1638, 32),
    "cpu": _device(0.2, 100, 64, "rates of the paper's CPU offload baseline; memory assumed"),
}

LINKS: Mapping[str, LinkSpec] = {
    "paper": _link(128, 200, "paper; CXL 3.1"),
    "pcie4": _link(31.5, 500, _PCIE),
    "pcie5": _link(63, 500, _PCIE),
    "pcie6": _link(121, 500, _PCIE),
    "pcie7": _link(242, 500, _PCIE),
    "cxl2": _link(63, 200, _CXL),
    "cxl3": _link(121, 200, _CXL),
    "cxl4": _link(242, 200, _CXL),
    "nvlink4": _link(450, 200, _NVLINK),
    "nvlink5": _link(900, 200, _NVLINK),
    "c2c": _link(450, 200, "Grace-Hopper; " + _NVLINK),
    "c2c-measured": LinkSpec(
        to_device_bytes_per_s=375 * GIGA,
        to_pool_bytes_per_s=297 * GIGA,
        latency_s=200 / GIGA,
        source="Grace-Hopper, rates as measured; latency assumed to be the paper's 200 ns",
    ),
    "copy": _link(50, 0, "a copy reads and writes memory of 100 GB/s once each", full_duplex=False),
}

POOL_DEVICES: Mapping[str, PoolDeviceSpec] = {
    "paper": PoolDeviceSpec(
        dram_bytes_per_s=1088 * GIGA,
        near_flops_per_s=2 * TERA,
        capacity_bytes=512 * GIGA,
        buffer_bytes=3 * 2**20,
        source="paper; CXL type 3, 8 LPDDR5X packages of 136 GB/s",
    ),
    "monde": PoolDeviceSpec(
        dram_bytes_per_s=512 * GIGA, near_flops_per_s=2.05e12, source="MoNDE, DAC 2024" + _NOT_STATED
    ),
    "karat": PoolDeviceSpec(
        dram_bytes_per_s=1200 * GIGA,
        near_flops_per_s=125 * TERA,
        source="KARAT, behind 600 ns round trip" + _NOT_STATED,
    ),
    "attacc": PoolDeviceSpec(
        dram_bytes_per_s=6000 * GIGA,
        near_flops_per_s=6 * TERA,
        source="AttAcc, ASPLOS 2024, one stack; compute assumed to be one FLOP a byte" + _NOT_STATED,
    ),
    "cpu": PoolDeviceSpec(
        dram_bytes_per_s=100 * GIGA, near_flops_per_s=0.2 * TERA, source="the paper's CPU offload baseline"
    ),
    "grace": PoolDeviceSpec(
        dram_bytes_per_s=546 * GIGA,
        near_flops_per_s=0,
        source="Grace LPDDR5X, peak; no near-data compute, as in the paper",
    ),
}


def _with_host(name: str, link: str) -> HardwareSpec:
    """An accelerator whose pool is its host's memory, with the host's cores near it."""
    return HardwareSpec(name=name, device=DEVICES[name], link=LINKS[link], pool_device=POOL_DEVICES["cpu"])


HARDWARE: Mapping[str, HardwareSpec] = {
    "paper": HardwareSpec(
        name="paper",
        device=DEVICES["h100"],
        link=LINKS["paper"],
        pool_device=POOL_DEVICES["paper"],
        num_pool_devices=4,
    ),
    "gh200": HardwareSpec(name="gh200", device=DEVICES["gh200"], link=LINKS["c2c"], pool_device=POOL_DEVICES["grace"]),
    "cpu": HardwareSpec(
        name="cpu",
        device=DEVICES["cpu"],
        link=LINKS["copy"],
        pool_device=POOL_DEVICES["cpu"],
        shared=frozenset(SHAREABLE),
    ),
    **{name: _with_host(name, "pcie4") for name in ("a100", "a100-pcie", "tpu-v5e", "tpu-v5p", "tpu-v6e")},
    **{name: _with_host(name, "pcie5") for name in ("h100", "h200", "b200")},
}


def parse_link(text: str) -> LinkSpec:
    """A link from its preset's name, or from "GB/s:latency_ns" with the same rate in both directions.

    Raises:
        HardwareError: it is neither.
    """
    if text in LINKS:
        return LINKS[text]
    rate, colon, latency = text.partition(":")
    try:
        if colon:
            return _link(float(rate), float(latency), "as given")
    except ValueError:
        pass
    raise HardwareError(
        f"link {text!r} is unknown: choose {', '.join(LINKS)}, or GB/s above 0 and latency in ns, such as 128:200"
    )


def parse_hardware(text: str) -> HardwareSpec:
    """A machine from its preset's name, or from a JSON file.

    Raises:
        HardwareError: there is no such preset or file, or the file does not describe hardware.
    """
    if text in HARDWARE:
        return HARDWARE[text]
    path = pathlib.Path(text).expanduser()
    if not path.is_file():
        raise HardwareError(f"hardware {text!r} is unknown: choose {', '.join(HARDWARE)}, or the path of a JSON file")
    try:
        return hardware_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise HardwareError(f"hardware file {text}: {error}") from error


def hardware_from_json(values: Mapping[str, Any]) -> HardwareSpec:
    """The machine that `HardwareSpec.to_json` wrote; device, link and pool device may be names of presets.

    Raises:
        HardwareError: a field is missing, unknown or not of its kind.
    """
    fields = dict(checked_fields(HardwareSpec, values, what="hardware"))
    fields["device"] = _part(DeviceSpec, fields["device"], DEVICES, what="device")
    fields["pool_device"] = _part(PoolDeviceSpec, fields["pool_device"], POOL_DEVICES, what="pool_device")
    link = fields["link"]
    fields["link"] = parse_link(link) if isinstance(link, str) else _part(LinkSpec, link, LINKS, what="link")
    if "shared" in fields:
        fields["shared"] = frozenset(fields["shared"])
    if "commands" in fields:
        fields["commands"] = _part(CommandLatencies, fields["commands"], {}, what="commands")
    if fields.get("calibration") is not None:
        fields["calibration"] = calibration_from_json(fields["calibration"])
    return HardwareSpec(**fields)


def save_hardware(hardware: HardwareSpec, path: str | pathlib.Path) -> None:
    """Writes a file that `parse_hardware` reads."""
    pathlib.Path(path).expanduser().write_text(json.dumps(hardware.to_json(), indent=2) + "\n", encoding="utf-8")


def _part(spec: type[_T], value: Any, presets: Mapping[str, _T], *, what: str) -> _T:
    if isinstance(value, str) and presets:
        if value not in presets:
            raise HardwareError(f"{what} {value!r} is unknown: choose {', '.join(presets)}, or give its figures")
        return presets[value]
    return spec(**checked_fields(spec, value, what=what))
