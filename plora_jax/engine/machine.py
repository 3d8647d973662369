"""The machine and the base model as the cost model sees them."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import platform as host

from memory_pool.hardware import HARDWARE, HardwareSpec, parse_hardware, parse_link
from plora_jax.config import ModelConfig
from strategies.cost import ModelShape, transformer

logger = logging.getLogger(__name__)

_KINDS = (
    ("gh200", "gh200"),
    ("h200", "h200"),
    ("h100", "h100"),
    ("b200", "b200"),
    ("a100-pcie", "a100-pcie"),
    ("a100", "a100"),
    ("v5 lite", "tpu-v5e"),
    ("v5e", "tpu-v5e"),
    ("v5", "tpu-v5p"),
    ("v6", "tpu-v6e"),
)
"""(part of a device's kind in lower case, preset): the first that is found."""

_UNKNOWN = "h100"


def calibration_path() -> pathlib.Path:
    """Where the calibration of this machine is, if there is one."""
    return pathlib.Path("~/.cache/plora_jax").expanduser() / f"hardware-{host.node() or 'local'}.json"


def find_hardware(
    hardware: str, link: str | None, *, platform: str, device_kind: str, pool_devices: int
) -> HardwareSpec:
    """The machine that plans are made for.

    Args:
        hardware: a preset, a file, or "auto": this machine's calibration file, else the preset of its device.
        link: a preset or "GB/s:latency_ns" instead of the hardware's link; None leaves that.
        platform: of JAX: "cpu", "gpu" or "tpu".
        device_kind: as JAX names the device.
        pool_devices: that the pool is divided into.

    Raises:
        HardwareError: there is no such hardware or link, or a file does not describe one.
    """
    if hardware != "auto":
        found = parse_hardware(hardware)
    elif calibration_path().is_file():
        found = parse_hardware(str(calibration_path()))
    else:
        found = HARDWARE[preset_of(platform, device_kind)]
    changes = {"num_pool_devices": pool_devices} | ({} if link is None else {"link": parse_link(link)})
    return dataclasses.replace(found, **changes)


def preset_of(platform: str, device_kind: str) -> str:
    """The hardware preset of a device; of one that none is for, that of an H100, with a warning."""
    if platform == "cpu":
        return "cpu"
    for part, preset in _KINDS:
        if part in device_kind.lower():
            return preset
    logger.warning(
        "no hardware preset is for %s: plans are made for %s; set --hardware to a preset or a calibration file",
        device_kind,
        _UNKNOWN,
    )
    return _UNKNOWN


def shape_of_model(
    config: ModelConfig,
    *,
    name: str,
    item_bytes: int,
    weight_bytes: float | None = None,
    lora_item_bytes: int | None = None,
    kv_item_bytes: float | None = None,
    shards: int = 1,
) -> ModelShape:
    """The phases, matrices and attention of one shard of a base model.

    Args:
        config: of the whole model.
        name: under which its base steps are in a calibration.
        item_bytes: of a number of activations, and of weights, adapters and KV unless what follows says otherwise.
        weight_bytes: of a base weight that is kept in another precision; None for `item_bytes`.
        lora_item_bytes: of a number of A and B; None for `item_bytes`.
        kv_item_bytes: of a number of KV, its part of a scale included; None for `item_bytes`.
        shards: of the mesh axis `tensor`.
    """
    whole = transformer(
        name,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        windows=config.layer_windows,
        experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        item_bytes=item_bytes,
        kv_item_bytes=kv_item_bytes,
    )
    return dataclasses.replace(whole, weight_bytes=weight_bytes, lora_item_bytes=lora_item_bytes).shard(shards)
