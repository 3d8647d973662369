"""The train_adapter command, from flags to files, on a model of the conformance pack."""

import contextlib
import io
import json
import pathlib
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from absl import flags

from launch import flags as train_flags
from launch import train_adapter
from launch.flags import StartError
from launch.train_adapter import define_flags, main
from plora_jax.adapters import load_adapter
from plora_jax.checkpoints import load_config
from plora_jax.training import TrainConfig

MODEL = pathlib.Path(__file__).parents[1] / "data/conformance/models/llama"
RUN = ("--base_name=tiny/llama", "--eval_fraction=0.25", "--targets=q_proj", "--targets=down_proj")
TEMPLATE = (
    "{% for m in messages %}丙{{ m.content }}{% if m.role == 'assistant' %}丂{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}丙{% endif %}"
)


def _letters(*ids):
    return "".join(chr(0x4E00 + i) for i in ids)


def _write_data(path):
    rows = [{"text": _letters(10 + i, 20, 30, 40, 50, 60)} for i in range(7)]
    chat = [{"role": "user", "content": _letters(9)}, {"role": "assistant", "content": _letters(20, 30, 40)}]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"messages": chat}]))
    return path


@pytest.fixture
def data(tmp_path):
    return _write_data(tmp_path / "train.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An output directory of a run that was not interrupted, and what the run showed."""
    path = tmp_path_factory.mktemp("trained")
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        assert _main(*_command(path, _write_data(path / "train.jsonl"), *RUN)) == 0
    return path / "out", shown.getvalue()


def _command(tmp_path, data, *extra):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    arguments = [
        "train_adapter",
        f"--model={MODEL}",
        f"--train_data={data}",
        f"--output_dir={tmp_path / 'out'}",
        f"--chat_template={tmp_path / 'template.jinja'}",
        "--max_length=32",
        "--batch_size=4",
        "--rank=4",
        "--learning_rate=0.01",
        "--epochs=4",
    ]
    return [*arguments, *extra]


def _load(path):
    return load_adapter(path, name="out", config=load_config(MODEL))


def _main(*command):
    values = flags.FlagValues()
    define_flags(values)
    values(list(command))
    return main(values)


def test_train_adapter_writes_an_adapter_that_learned(trained):
    output, shown = trained
    for line in ("6 training examples", "2 held-out examples", "% lower)"):
        assert line in shown
    report = json.loads((output / "report.json").read_text())
    assert report["steps"] == 8
    assert report["eval_loss"] < report["base_eval_loss"]
    config = json.loads((output / "peft/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny/llama"
    assert (config["r"], sorted(config["target_modules"])) == (4, ["down_proj", "q_proj"])


def test_train_adapter_peft_output_is_the_orbax_output_in_bfloat16(trained):
    output, _ = trained
    peft, exact = _load(output / "peft"), _load(output / "orbax")
    assert peft.modules.keys() == exact.modules.keys()
    for module, matrices in exact.modules.items():
        np.testing.assert_array_equal(peft.modules[module].b, matrices.b.astype(ml_dtypes.bfloat16))
        assert peft.modules[module].scale == matrices.scale == 8.0


def test_train_adapter_interrupted_then_resumed_equals_uninterrupted(tmp_path, data, trained, capsys, monkeypatch):
    command = _command(tmp_path, data, *RUN)
    monkeypatch.setattr(sys, "argv", command)
    real = train_adapter.training_progress

    class Interrupting:
        def __init__(self, total, console):
            del total, console

        def __enter__(self):
            return lambda progress: signal.raise_signal(signal.SIGINT) if progress.step == 3 else None

        def __exit__(self, *exc):
            return None

    monkeypatch.setattr(train_adapter, "training_progress", Interrupting)
    assert _main(*command) == 130
    shown = capsys.readouterr().err
    assert "stopped after step 3 of 8" in shown
    assert "go on with: python -m launch.train_adapter --model=" in shown
    assert shown.rstrip().endswith("--resume")
    monkeypatch.setattr(train_adapter, "training_progress", real)
    assert _main(*command, "--resume") == 0
    one, two = _load(trained[0] / "orbax"), _load(tmp_path / "out/orbax")
    for module, matrices in one.modules.items():
        np.testing.assert_array_equal(two.modules[module].a, matrices.a)
        np.testing.assert_array_equal(two.modules[module].b, matrices.b)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (["--rank=0", "--targets=w_proj"], "rank must be at least 1, got 0; targets must be a choice without repeats"),
        (["--max_length=2"], "no training example has a learned token within --max_length=2 tokens: raise it"),
        (["--resume"], "start the run without --resume"),
        (["--train_data=/nowhere.jsonl"], "cannot read /nowhere.jsonl: No such file or directory."),
        (["--model=/nowhere"], "/nowhere does not exist"),
        (["--eval_fraction=0.5", "--eval_data=x"], "give either --eval_data or --eval_fraction, not both"),
        (["--chat_template=/nowhere.jinja"], "/nowhere.jinja"),
        (["--train_data=", "--output_dir="], "--train_data is missing; --output_dir is missing"),
        (["--dtype=int8"], "--dtype must be auto, float32 or bfloat16, got 'int8'"),
    ],
)
def test_train_adapter_bad_options_say_what_to_change(tmp_path, data, extra, problem):
    if extra == ["--max_length=2"]:
        data.write_text(json.dumps({"messages": [{"role": r, "content": _letters(9)} for r in ("user", "assistant")]}))
    with pytest.raises(StartError) as error:
        _main(*_command(tmp_path, data, *extra))
    assert problem in str(error.value)


def test_train_adapter_output_dir_that_cannot_be_made_is_refused_before_the_weights(tmp_path, data):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"--output_dir '.*/file/out' cannot be made: .*Not a directory"):
        _main(*_command(tmp_path, data, f"--output_dir={tmp_path / 'file' / 'out'}", "--model=/nowhere"))


def test_define_flags_defaults_are_those_of_the_configuration():
    values = flags.FlagValues()
    define_flags(values)
    values(["x"])
    assert train_flags.read(TrainConfig, flag_values=values) == TrainConfig()


def test_train_adapter_help_shows_an_example():
    shown = subprocess.run(
        [sys.executable, "-m", "launch.train_adapter", "--help"], capture_output=True, text=True, check=False
    ).stdout
    assert "python -m launch.train_adapter --train_data=" in shown
    assert "--learning_rate" in shown
