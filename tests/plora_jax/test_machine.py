"""Which hardware plans are made for, and the model as the cost model sees it."""

import pytest

from memory_pool.figures import HardwareError
from memory_pool.hardware import HARDWARE, save_hardware
from plora_jax.checkpoints import load_config
from plora_jax.engine import machine
from plora_jax.engine.engine_config import EngineConfig
from tests.plora_jax.conformance import PACK

CPU = {"platform": "cpu", "device_kind": "cpu", "pool_devices": 1}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty place for calibration files."""
    path = tmp_path / "hardware-me.json"
    monkeypatch.setattr(machine, "calibration_path", lambda: path)
    return path


def test_auto_is_the_calibration_file_where_there_is_one(cache):
    assert machine.find_hardware("auto", None, **CPU).name == "cpu"
    save_hardware(HARDWARE["gh200"], cache)
    assert machine.find_hardware("auto", None, **CPU).name == "gh200"
    assert machine.find_hardware("cpu", None, **CPU).name == "cpu"


def test_auto_with_a_broken_file_names_it(cache):
    cache.write_text("{")
    with pytest.raises(HardwareError, match=r"hardware file .*hardware-me.json"):
        machine.find_hardware("auto", None, **CPU)


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
    ],
)
def test_preset_is_that_of_the_device(kind, preset):
    assert machine.preset_of("gpu", kind) == preset
    assert preset in HARDWARE


def test_preset_of_an_unknown_device_warns(caplog):
    assert machine.preset_of("gpu", "Abacus 9") == "h100"
    assert "no hardware preset is for Abacus 9" in caplog.text


def test_link_and_pool_devices_stand_over_the_hardware():
    found = machine.find_hardware("paper", "64:100", platform="cpu", device_kind="cpu", pool_devices=3)
    assert (found.num_pool_devices, found.link.to_device_bytes_per_s) == (3, 64e9)
    assert found.link.latency_s == pytest.approx(100e-9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hardware": "abacus"}, "--hardware: hardware 'abacus' is unknown: choose"),
        ({"link": "fast"}, "--link: link 'fast' is unknown: choose"),
        ({"planner": "oracle"}, "--planner must be one of joint, paper, lru, got 'oracle'"),
        ({"plan_interval_steps": 0}, "--plan_interval_steps must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        EngineConfig(**options).validate()


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_shape_has_the_projections_of_the_model(name):
    config = load_config(str(PACK / "models" / name))
    shape = machine.shape_of_model(config, name=name, item_bytes=4)
    widths = {matrix.name: (matrix.outputs, matrix.inputs) for matrix in shape.matrices}
    assert widths == dict(config.projections)
    assert shape.attention.layers == config.num_layers
    assert shape.bytes_of_weight == 4
    small = machine.shape_of_model(config, name=name, item_bytes=4, weight_bytes=1, lora_item_bytes=2).shard(2)
    assert (shape.bytes_of_lora, small.bytes_of_weight, small.bytes_of_lora) == (4, 1, 2)
