"""The file of figures is refused early where it cannot be, and late with the reason."""

import json

import pytest

from launch.benchmarks.output import output_problems, write_json
from launch.flags import StartError


def test_figures_are_written_as_json(tmp_path):
    file = str(tmp_path / "x.json")
    assert output_problems(file) == output_problems(None) == []
    write_json(file, {"a": [1, 2]})
    write_json(None, {"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [1, 2]}


def test_file_that_cannot_be_written_is_refused(tmp_path):
    assert output_problems("/nowhere/x.json") == [
        "--output_json '/nowhere/x.json' is in a directory that does not exist: make it first"
    ]
    with pytest.raises(StartError, match=f"--output_json '{tmp_path}' cannot be written: "):
        write_json(str(tmp_path), {})
