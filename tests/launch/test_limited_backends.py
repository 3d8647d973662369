"""What a start prints, and refuses, on backends that lack near-data compute or host memory."""

import io
import re

import pytest
from rich.console import Console

from launch.console import StageLog
from launch.flags import StartError
from launch.startup import start_engine
from tests.launch.small_engine import small_config

WITHOUT_COMPUTE = (
    r"^pool +\d+ MB, of it taken: ",
    r"^link +cpu: memory kinds device, .*; near-data functions do not work: NotImplementedError: switched off by "
    r"PLORA_NEAR_DATA=0; what is in the pool is copied to the device block by block, and all is computed there; ",
)
WITHOUT_HOST_MEMORY = (
    r"^pool +\d+ MB of device memory, of it taken: ",
    r"^link +cpu: memory kinds device, .*; the pool is emulated \(PLORA_POOL=device asks for it\): pool and device are "
    r"the same memory: link bytes are counted, nothing moves; near-data functions run on the device, \d+ us a call$",
)


def start(**options):
    output = io.StringIO()
    try:
        start_engine(small_config(hardware="cpu", **options), {}, log=StageLog(Console(file=output))).engine.shutdown()
    finally:
        print(output.getvalue())
    return output.getvalue()


@pytest.mark.parametrize(
    ("variable", "value", "lines"),
    [("PLORA_NEAR_DATA", "0", WITHOUT_COMPUTE), ("PLORA_POOL", "device", WITHOUT_HOST_MEMORY)],
)
def test_start_says_what_the_backend_lacks_and_what_serves_instead(variable, value, lines, monkeypatch):
    monkeypatch.setenv(variable, value)
    output = start()
    for line in lines:
        assert re.search(line, output, re.MULTILINE), f"{line} is not in\n{output}"


def test_start_with_a_strategy_that_the_backend_cannot_do_names_the_flag_and_what_to_choose(monkeypatch):
    monkeypatch.setenv("PLORA_NEAR_DATA", "0")
    message = (
        "--lora_strategy split computes near the data, which does not work on this cpu (NotImplementedError: switched "
        "off by PLORA_NEAR_DATA=0): choose one of auto, resident, fetch"
    )
    with pytest.raises(StartError, match=f"^{re.escape(message)}$"):
        start(lora_strategy="split")
