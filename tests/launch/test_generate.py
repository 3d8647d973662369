"""The generate program: one shot, and a chat in the terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from launch.chat_terminal import ChatTerminal, Speaker
from launch.flags import StartError
from launch.generate import GenerateConfig, choose_adapter, read_prompt
from plora_jax.adapters.adapter import Adapter
from plora_jax.engine import SamplingParams
from tests.launch.http_rig import REPLY, HttpRig, http_rig
from tests.launch.small_engine import PACK, ROOT, small_flags


@pytest.fixture
def rig() -> Iterator[HttpRig]:
    with http_rig() as made:
        made.engine.add_adapter(Adapter("pirate", {}, {}))
        yield made


class Terminal:
    """A chat whose user types what the test says."""

    def __init__(self, rig: HttpRig, *typed: str | type[BaseException], **options: object) -> None:
        self.out, self.err, self.prompts = io.StringIO(), io.StringIO(), []
        self._typed = iter(typed)
        sampling = options.pop("sampling", SamplingParams(max_tokens=None))
        speaker = Speaker(rig.engine, sampling, adapter=options.pop("adapter", None), out=self.out, err=self.err)
        self.asked: list[str] = []
        encode = rig.engine.tokenizer.encode
        rig.engine.tokenizer.encode = lambda text, **kw: self.asked.append(text) or encode(text, **kw)
        self.chat = ChatTerminal(speaker, read_line=self._read_line, **options)
        self.code = self.chat.run()

    def _read_line(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._typed, EOFError)
        if not isinstance(line, str):
            raise line
        return line


def test_chat_answers_and_remembers_the_conversation(rig):
    terminal = Terminal(rig, "Hi", "And?", "/quit")
    assert terminal.out.getvalue() == f"{REPLY}\n{REPLY}\n"
    assert terminal.code == 0
    assert terminal.asked[1] == (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{REPLY}<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_switches_the_adapter_while_chatting(rig):
    terminal = Terminal(rig, "Hi", "/adapter pirate", "Hi", "/adapter", "Hi")
    first, second, third = terminal.out.getvalue().splitlines()
    assert first == third == REPLY
    assert second.endswith("]" + REPLY)
    assert terminal.prompts == ["base> ", "base> ", "pirate> ", "pirate> ", "base> ", "base> "]


def test_chat_refuses_an_unknown_adapter_and_goes_on(rig):
    terminal = Terminal(rig, "/adapter x", "Hi")
    assert "no adapter named 'x' is loaded; there are: pirate" in terminal.err.getvalue()
    assert terminal.out.getvalue() == f"{REPLY}\n"


def test_chat_with_an_unknown_adapter_at_the_start_fails(rig):
    assert Terminal(rig, "Hi", adapter="x").code == 1


def test_chat_commands_do_what_they_say(rig):
    terminal = Terminal(
        rig, "/adapters", "/system Be brief.", "Hi", "/reset", "Yo", "/system", "/help", "/nonsense", "  "
    )
    assert terminal.asked[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    assert "Hi" not in terminal.asked[1]
    assert terminal.chat.system is None
    said = terminal.err.getvalue()
    assert "pirate\n" in said
    assert "/adapter NAME" in said
    assert "there is no command /nonsense" in said
    assert len(terminal.asked) == 2


def test_chat_over_the_context_says_so_and_forgets_only_that_turn(rig):
    terminal = Terminal(rig, "Hi", "x" * 300, "Yo")
    assert "maximum context length" in terminal.err.getvalue()
    assert "/reset" in terminal.err.getvalue()
    assert "xxx" not in terminal.asked[2]
    assert terminal.out.getvalue().count(REPLY) == 2


def test_interrupt_stops_the_answer_and_not_the_chat(rig):
    steps = iter(range(1000))

    def interrupt(_) -> None:
        time.sleep(0.005)
        if next(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    rig.executor.before_step = interrupt
    terminal = Terminal(rig, "Hi", KeyboardInterrupt, "Hi")
    first, second = terminal.out.getvalue().splitlines()
    assert REPLY.startswith(first)
    assert first != REPLY
    assert second == REPLY
    assert "(stopped)" in terminal.err.getvalue()
    rig.wait_idle()


def test_failed_answer_is_told_and_not_remembered(rig):
    rig.executor.fail_with = RuntimeError("on fire")
    terminal = Terminal(rig, "Hi")
    assert "on fire" in terminal.err.getvalue()
    assert terminal.chat.messages == []


@pytest.mark.parametrize(("raw", "asked"), [(True, "Once"), (False, "<|im_start|>user\nOnce<|im_end|>\n")])
def test_answer_once_continues_the_text_or_answers_it(rig, raw, asked):
    terminal = Terminal(rig)
    assert terminal.chat.speaker.answer_once("Once", raw=raw, system=None) == 0
    assert terminal.out.getvalue() == f"{REPLY}\n"
    assert terminal.asked[0].startswith(asked)


def test_answer_once_with_an_unknown_adapter_says_so(rig):
    terminal = Terminal(rig)
    terminal.chat.speaker.adapter = "x"
    assert terminal.chat.speaker.answer_once("Hi", raw=False, system=None) == 1
    assert "'x'" in terminal.err.getvalue()


def test_prompt_comes_from_flag_file_or_pipe(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    piped = iter(["from a pipe"]).__next__
    assert read_prompt(GenerateConfig(prompt="p"), piped=piped) == "p"
    assert read_prompt(GenerateConfig(prompt_file=str(file)), piped=piped) == "from a file"
    assert read_prompt(GenerateConfig(), piped=piped) == "from a pipe"
    assert read_prompt(GenerateConfig(), piped=None) is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"prompt": "p", "prompt_file": "f"}, "--prompt and --prompt_file are both given"),
        ({"prompt_file": "/nowhere/f"}, "--prompt_file '/nowhere/f' cannot be read"),
        ({"prompt": " "}, "the prompt is empty"),
        ({}, "the prompt is empty"),
    ],
)
def test_prompt_that_cannot_be_is_refused(config, says):
    with pytest.raises(StartError) as caught:
        read_prompt(GenerateConfig(**config), piped=lambda: "")
    assert says in str(caught.value)


def test_adapter_is_a_name_or_a_directory():
    path = str(PACK / "adapters" / "plain_qv")
    assert choose_adapter(None, {"a": "/a"}) == (None, {"a": "/a"})
    assert choose_adapter("a", {"a": "/a"}) == ("a", {"a": "/a"})
    assert choose_adapter(path, {"a": "/a"}) == ("plain_qv", {"a": "/a", "plain_qv": path})
    assert choose_adapter(path + "/", {}) == ("plain_qv", {"plain_qv": path + "/"})
    assert choose_adapter("json", {}, shipped=["json"]) == ("json", {})


def test_choose_adapter_that_is_nowhere_is_refused_with_the_names_there_are():
    with pytest.raises(StartError, match=r"--adapter '/nowhere/sql' is no directory and names no adapter \(a, json\)"):
        choose_adapter("/nowhere/sql", {"a": "/a"}, shipped=["json"])
    with pytest.raises(StartError, match=r"names no adapter \(none\); .* --lora_modules NAME=PATH"):
        choose_adapter("sql=/adapters/sql", {})


def test_choose_adapter_of_a_directory_without_one_says_what_is_missing(tmp_path):
    name = tmp_path.name
    says = f"--adapter '{tmp_path}': adapter '{name}': {tmp_path} has no adapter_model.safetensors"
    with pytest.raises(StartError, match=f"^{re.escape(says)}$"):
        choose_adapter(str(tmp_path), {})


def test_chat_without_a_chat_template_is_refused_with_the_ways_out():
    command = [sys.executable, "-m", "launch.generate", *small_flags(), "--prompt=a"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert "no chat template: give one with --chat_template, or continue a text with --raw --prompt" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature=-1"], "error: --temperature must be between 0 and 100, got -1.0.\n"),
        (["--max_tokens=-1"], "error: --max_tokens must be at least 1, got -1.\n"),
    ],
)
def test_value_that_cannot_be_is_refused_before_anything_is_loaded(arguments, says):
    # Were the model looked for first, the error would be another.
    command = [sys.executable, "-m", "launch.generate", "--model=/nowhere", "--prompt=x", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, says)


def test_one_shot_with_a_real_model_and_adapter_prints_the_golden_text():
    with np.load(PACK / "adapters" / "plain_qv" / "golden.npz") as arrays:
        prompt, wanted = ("".join(chr(0x4E00 + t) for t in arrays[name]) for name in ("prompt_1", "greedy_1"))
    command = [sys.executable, "-m", "launch.generate", *small_flags(), "--raw", "--ignore_eos"]
    command += [f"--adapter={PACK / 'adapters' / 'plain_qv'}", "--temperature=0", "--max_tokens=12"]
    done = subprocess.run(command, input=prompt, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, wanted + "\n"), done.stderr


_CHAT = """
from launch.chat_terminal import ChatTerminal, Speaker
from plora_jax.engine import SamplingParams
from tests.launch.http_rig import http_rig
with http_rig() as rig:
    ChatTerminal(Speaker(rig.engine, SamplingParams(max_tokens=None))).run()
"""


def test_chat_works_in_a_real_terminal():
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", _CHAT]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT)
    os.close(terminal)
    screen = b""

    def wait_for(text: str) -> None:
        nonlocal screen
        until_s = time.monotonic() + 90
        while text.encode() not in screen:
            assert time.monotonic() < until_s, screen.decode()
            if select.select([controller], [], [], 0.1)[0]:
                screen += os.read(controller, 4096)
        screen = screen.partition(text.encode())[2]

    try:
        wait_for("base> ")
        os.write(controller, b"Hi\n")
        wait_for(REPLY)
        wait_for("base> ")
        # readline shows the prompt a moment before it waits; a signal in between is only seen with the next key.
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        wait_for("ends the chat")
        os.write(controller, b"/quit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(controller)
