"""What must survive a save to the last bit, and Orbax checkpoints whose arrays and JSON tell different stories."""

import json
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from plora_jax.adapters import AdapterError, ModuleId, load_adapter, save_adapter, save_adapter_orbax
from tests.plora_jax.adapters_for_tests import MODEL, PACK, lora_tensors, write_peft


def load(path, **options):
    return load_adapter(path, name="x", config=MODEL, **options)


@pytest.fixture
def checkpoint(tmp_path):
    save_adapter_orbax(load(PACK / "adapters" / "plain_qv"), tmp_path / "saved")
    return tmp_path / "saved"


def replace_arrays(checkpoint, **changed):
    adapter = load(checkpoint)
    tree = {f"layers.{m.layer}.{m.projection}": {"a": x.a, "b": x.b} for m, x in adapter.modules.items()} | changed
    shutil.rmtree(checkpoint / "matrices")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(checkpoint / "matrices", tree)
        checkpointer.wait_until_finished()


@pytest.mark.parametrize("save", [save_adapter, save_adapter_orbax])
def test_save_keeps_the_order_of_patterns_on_which_rank_and_scale_hang(save, tmp_path):
    # Sorted, ".*self_attn.*" would come first and match q_proj too.
    tensors = lora_tensors(("q_proj",), rank=2) | lora_tensors(("v_proj",), rank=4)
    patterns = {"rank_pattern": {"q_proj": 2, ".*self_attn.*": 4}, "alpha_pattern": {"q_proj": 6, ".*self_attn.*": 4}}
    adapter = load(write_peft(tmp_path / "peft", tensors, **patterns))
    save(adapter, tmp_path / "once")
    save_adapter(load(tmp_path / "once"), tmp_path / "twice")
    for path in ("once", "twice"):
        modules = load(tmp_path / path).modules
        assert {m: (x.rank, x.scale) for m, x in modules.items()} == {
            ModuleId(layer, p): rule for layer in range(3) for p, rule in (("q_proj", (2, 3.0)), ("v_proj", (4, 1.0)))
        }


def test_save_adapter_lets_the_same_users_read_both_files(tmp_path):
    save_adapter(load(PACK / "adapters" / "plain_qv"), tmp_path / "saved")
    assert len({file.stat().st_mode for file in (tmp_path / "saved").iterdir()}) == 1


def test_load_adapter_with_a_number_of_thousands_of_digits_is_refused(tmp_path):
    path = write_peft(tmp_path / "a")
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": ' + "9" * 6000 + "}")
    with pytest.raises(AdapterError, match=r"adapter_config\.json \(\d+ bytes\) is not JSON: Exceeds the limit"):
        load(path)


def test_load_adapter_scale_that_float32_cannot_hold_is_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"lora_alpha .* is 1e\+300; it must be a finite number of float32"):
        load(write_peft(tmp_path / "a", lora_alpha=1e300))


@pytest.mark.parametrize(
    "scale", [10**400, 1e300, True, "2.0", float("nan")], ids=["int", "float", "bool", "str", "nan"]
)
def test_restore_adapter_with_a_scale_that_is_no_float32_is_refused(scale, checkpoint):
    file = checkpoint / "plora_adapter.json"
    content = json.loads(file.read_text())
    content["modules"]["layers.0.q_proj"]["scale"] = scale
    file.write_text(json.dumps(content))
    with pytest.raises(AdapterError, match=r"gives layers\.0\.q_proj the scale .*must be a finite number of float32"):
        load(checkpoint)


def test_restore_adapter_whose_json_gives_another_rank_says_both(checkpoint):
    file = checkpoint / "plora_adapter.json"
    file.write_text(file.read_text().replace('"rank": 4', '"rank": 8', 1))
    with pytest.raises(AdapterError, match=r"gives rank 8 at layers\.0\.q_proj, but layers\.0\.q_proj\.a has rank 4"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"other": np.ones(3)}, "extra other"),
        (
            {"layers.0.q_proj": np.ones(3)},
            r"missing layers\.0\.q_proj\.a, layers\.0\.q_proj\.b; extra layers\.0\.q_proj",
        ),
        (
            {"layers.0.q_proj": {"a": {"c": np.ones(3)}, "b": np.ones((64, 4))}},
            r"missing .*q_proj\.a; extra .*q_proj\.a\.c",
        ),
        (
            {"layers.0.q_proj": {"a": np.ones((4, 64), np.int32), "b": np.ones((64, 4))}},
            r"layers\.0\.q_proj\.a of dtype int32",
        ),
    ],
    ids=["extra", "array for a module", "deeper", "whole numbers"],
)
def test_restore_adapter_with_another_tree_names_the_arrays(changed, text, checkpoint):
    replace_arrays(checkpoint, **changed)
    with pytest.raises(AdapterError, match=rf"the arrays do not fit plora_adapter\.json: {text}"):
        load(checkpoint)


def test_restore_adapter_without_orbax_metadata_is_refused(checkpoint):
    for file in (checkpoint / "matrices").glob("_*"):
        file.unlink()
    with pytest.raises(AdapterError, match=r"matrices is not a complete Orbax checkpoint: .*; save it again"):
        load(checkpoint)
