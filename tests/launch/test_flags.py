"""Flags from dataclasses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from launch import flags, generate, serve
from launch.http import HttpConfig
from launch.startup import AdapterFlags
from plora_jax.engine.build import EngineConfig
from strategies.strategy_table import ATTENTION, LORA


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """An example.

    Attributes:
        size: how large, MB of 1e6 bytes; the text goes on
            in the next line.
        ratio: a number.
        limit: None for none.
        on: a switch.
        maybe: a switch with a third state.
        names: repeatable.
        title: a text.
    """

    size: int = 3
    ratio: float = 0.5
    limit: int | None = None
    on: bool = True
    maybe: bool | None = None
    names: tuple[str, ...] = ()
    title: str | None = "x"


def parse(config_class: type, *arguments: str, **options: object) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    flags.define(config_class, flag_values=values, **options)
    values(["program", *arguments])
    return values


def test_read_without_arguments_gives_the_defaults():
    assert flags.read(_Config, flag_values=parse(_Config)) == _Config()


def test_read_gives_what_the_command_line_says():
    arguments = ["--size=4", "--ratio=1", "--limit=7", "--noon", "--maybe", "--names=a", "--names=b", "--title=t"]
    wanted = _Config(size=4, ratio=1.0, limit=7, on=False, maybe=True, names=("a", "b"), title="t")
    assert flags.read(_Config, flag_values=parse(_Config, *arguments)) == wanted
    assert flags.read(_Config, flag_values=parse(_Config, *arguments), size=9).size == 9


def test_help_is_the_attribute_of_the_docstring():
    values = parse(_Config)
    assert values["size"].help == "How large, MB of 1e6 bytes; the text goes on in the next line."
    assert values["ratio"].help == "A number."


def test_help_says_unset_for_what_no_command_line_can_write():
    assert parse(_Config)["limit"].help == "Unset for none."
    for program in (serve, generate):
        values = absl_flags.FlagValues()
        program.define_flags(values)
        assert not [name for name in values if "None" in (values[name].help or "")]


def test_field_that_is_left_out_has_no_flag_and_keeps_its_default():
    values = parse(_Config, leave_out=("size",))
    assert "size" not in values
    assert flags.read(_Config, flag_values=values).size == 3
    assert set(parse(_Config, only=("size",))) - set(absl_flags.FlagValues()) == {"size"}


@pytest.mark.parametrize("config_class", [EngineConfig, HttpConfig, AdapterFlags, generate.GenerateConfig])
def test_every_field_of_a_program_has_a_help_and_no_two_a_flag(config_class):
    values = parse(config_class)
    assert all(values[field.name].help for field in dataclasses.fields(config_class))


@pytest.mark.parametrize(
    ("flag", "choices"),
    [
        ("lora_strategy", ("auto", *LORA)),
        ("attention_strategy", ("auto", *ATTENTION)),
        ("pool_placement", ("pinned", "striped")),
        ("pool_memory_gb", ("GB",)),
    ],
)
def test_help_of_the_pool_and_the_strategies_names_every_choice_and_unit(flag, choices):
    text = parse(EngineConfig)[flag].help
    assert [choice for choice in choices if choice not in text] == []


def test_both_programs_define_their_flags_without_a_clash():
    for program in (serve, generate):
        values = absl_flags.FlagValues()
        program.define_flags(values)
        assert {"model", "lora_modules", "device_kv_mb"} <= set(values)


def test_flagfile_is_read(tmp_path):
    file = tmp_path / "server.flags"
    file.write_text("--port=1234\n# a comment\n--lora_modules=a=/x\n--lora_modules=b=/y\n")
    values = absl_flags.FlagValues()
    serve.define_flags(values)
    values(["program", f"--flagfile={file}"])
    assert flags.read(HttpConfig, flag_values=values).port == 1234
    assert flags.read(AdapterFlags, flag_values=values).lora_modules == ("a=/x", "b=/y")


_PROGRAM = """
import sys
from absl import flags as absl_flags
from launch import flags
from tests.launch.test_flags import _Config
flags.define(_Config)
def main():
    raise flags.StartError("size 3 is\\nodd: make it even")
flags.run(main)
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--size=x"], "flag --size=x"),
        (["--sise=1"], "Unknown command line flag 'sise'"),
        (["stray"], "error: unexpected argument 'stray': all options are flags, see --help"),
        (["--names", "a=x", "b=y"], "error: unexpected argument 'b=y': repeat the flag for each value, --names=b=y"),
        (
            ["--names=a=x", "b=y", "c=z"],
            "error: unexpected argument 'b=y': repeat the flag for each value, --names=b=y",
        ),
        (["--title=a", "b"], "error: unexpected argument 'b': all options are flags, see --help"),
        (["--flagfile=/nowhere/x"], "error: --flagfile '/nowhere/x' cannot be read: No such file or directory"),
        (["--flagfile=/"], "error: --flagfile '/' cannot be read: Is a directory"),
        ([], "error: size 3 is odd: make it even"),
    ],
)
def test_bad_command_line_is_one_line_and_exit_code_2(arguments, says):
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
