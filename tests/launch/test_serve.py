"""The serve program: the whole, from flags to answers, with a real model of the conformance pack."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import jax
import numpy as np
import openai
import pytest
from rich.console import Console

from launch import startup
from launch.console import StageLog, in_bytes
from launch.flags import StartError
from launch.greeting import server_url
from launch.http import HttpConfig
from launch.serve import check
from launch.startup import engine_problems, parse_lora_modules, read_template, shipped_adapters, start_engine
from plora_jax.engine.build import EngineConfig
from tests.launch.small_engine import PACK, ROOT, small_config, small_flags


class Served:
    """A server in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.serve", "--port=0", *small_flags(), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if len([one for one in self.lines if one.startswith("curl")]) == 2:
                break
        self.output = "\n".join(self.lines)
        ready = re.search(r"ready +(\S+)", self.output)
        assert ready, self.output + self.process.communicate()[1]
        self.url = ready[1]

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    adapters = PACK / "adapters"
    made = Served(
        f"--lora_modules=qv={adapters / 'plain_qv'}",
        f'--lora_modules={{"name": "all", "path": "{adapters / "all_linear"}"}}',
        f"--adapter_root={adapters}",
    )
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def golden(folder: str, prompt: int) -> tuple[list[int], str]:
    """Prompt ids and the text of the greedy tokens; id i is the character U+4E00 + i."""
    with np.load(PACK / folder / "golden.npz") as arrays:
        tokens = arrays[f"greedy_{prompt}"].tolist()
        return arrays[f"prompt_{prompt}"].tolist(), "".join(chr(0x4E00 + t) for t in tokens)


_MODELS = {"llama": "models/llama", "qv": "adapters/plain_qv", "all": "adapters/all_linear"}


def test_base_and_adapters_at_once_give_the_golden_tokens(served, client):
    got: dict[tuple[str, int], str] = {}

    def ask(model: str, prompt: int) -> None:
        ids, _ = golden(_MODELS[model], prompt)
        options = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
        chunks = client.completions.create(model=model, prompt=ids, stream=True, **options)
        got[model, prompt] = "".join(chunk.choices[0].text for chunk in chunks)

    pairs = [(model, prompt) for model in _MODELS for prompt in range(4)]
    threads = [threading.Thread(target=ask, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {(model, prompt): golden(_MODELS[model], prompt)[1] for model, prompt in pairs}


def test_seed_repeats_and_logprobs_are_probabilities(client):
    options = {"model": "qv", "prompt": [72, 220, 249], "max_tokens": 6, "seed": 3, "logprobs": 2, "n": 2}
    first, second = client.completions.create(**options), client.completions.create(**options)
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert first.choices[0].text != first.choices[1].text
    shape = first.choices[0].logprobs
    assert all(p <= 0 for p in shape.token_logprobs)
    assert all(2 <= len(top) <= 3 for top in shape.top_logprobs)


def test_echo_scores_the_prompt_as_the_golden_logits_do(client):
    ids, _ = golden("models/llama", 1)
    with np.load(PACK / "models" / "llama" / "golden.npz") as arrays:
        logits = arrays["logits_1"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = [logprobs[p, token] for p, token in enumerate(ids[1:])]
    answer = client.completions.create(model="llama", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    got = answer.choices[0].logprobs.token_logprobs
    assert got[0] is None
    np.testing.assert_allclose(got[1:], wanted, atol=2e-4)


def test_load_over_http_serves_the_golden_tokens_and_refuses_by_name(served, client):
    url = f"{served.url}/v1/load_lora_adapter"
    assert httpx.post(url, json={"lora_name": "rs", "lora_path": "rslora"}, timeout=60).status_code == 200
    ids, text = golden("adapters/rslora", 1)
    options = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
    assert client.completions.create(model="rs", prompt=ids, **options).choices[0].text == text
    refused = httpx.post(url, json={"lora_name": "d", "lora_path": "dora"}, timeout=60)
    assert refused.status_code == 400
    assert "dora" in refused.json()["error"]["message"].lower()
    absent = httpx.post(url, json={"lora_name": "d", "lora_path": "nothing"}, timeout=60)
    assert absent.status_code == 404
    assert [card.id for card in client.models.list().data] == ["llama", "all", "qv", "rs"]


def test_curl_lines_work_as_they_are_printed(served):
    lines = [line for line in served.lines if line.startswith("curl")]
    assert len(lines) == 2
    models = set()
    for line in lines:
        words = shlex.split(line)
        headers = dict(w.split(": ", 1) for w, flag in zip(words[1:], words, strict=False) if flag == "-H")
        answer = httpx.post(words[1], content=words[words.index("-d") + 1], headers=headers, timeout=60).json()
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        models.add(answer["model"])
    assert models == {"llama", "qv"}


def test_start_says_what_is_loaded_and_what_memory_it_takes(served):
    for pattern in (
        r"weights +\d+ kB in ",
        r"programs +\d+ in ",
        r"adapters +2 in ",
        r"model +llama: llama, 3 layers, float32",
        r"memory +3 MB on the device: weights 514 kB, adapter 1 MB, kv 1 MB",
        r"pool +\d+ MB, of it taken: adapter \d+ kB, kv 0 B",
        r"context +512 tokens a sequence; the pool has room for the KV of \d+ tokens",
        r"kernels +\S",
        r"link +cpu: memory kinds .*; near-data functions work, \d+ us a call; link bytes are emulated",
        r"planner +joint, for hardware \S+, cost model (ideal|calibrated)",
        r"serving +llama, all, qv",
    ):
        assert re.search(pattern, served.output), f"{pattern} is not in\n{served.output}"


def test_traffic_compiles_nothing(served, client):
    def compilations() -> float:
        text = httpx.get(f"{served.url}/metrics").text
        return float(re.search(r"^plora:compilations_total\S* (\S+)", text, re.MULTILINE)[1])

    before = compilations()
    assert before > 0
    for model in ("llama", "qv", "all"):
        client.completions.create(model=model, prompt=[5] * 100, max_tokens=20, n=3, logprobs=1)
    assert compilations() == before


def test_metrics_show_device_memory_and_link_bytes(served):
    text = httpx.get(f"{served.url}/metrics").text
    for name in ("plora:device_cache_bytes", "plora:pool_bytes", "plora:link_bytes_total", "vllm:cache_config_info"):
        assert re.search(rf"^{name}{{.*}} [1-9]", text, re.MULTILINE), f"{name} is not in\n{text}"


def test_sigterm_ends_with_code_0_and_no_noise(served):
    code, err = served.stop()
    assert (code, err) == (0, "")


def test_port_in_use_ends_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "launch.serve", f"--port={taken.getsockname()[1]}", "--model=/nowhere"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot listen on 127.0.0.1 port ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("engine", "http", "says"),
    [
        ({"max_num_seqs": 0}, {}, "--max_num_seqs must be at least 1, got 0"),
        ({"dtype": "int3"}, {}, "--dtype must be"),
        (
            {"lora_strategy": "E3"},
            {},
            "--lora_strategy must be one of auto, resident, fetch, near_data, split, got 'E3'",
        ),
        (
            {"attention_strategy": "near"},
            {},
            "--attention_strategy must be one of auto, local, distributed, got 'near'",
        ),
        ({"pool_placement": "spread"}, {}, "--pool_placement must be one of pinned, striped, got 'spread'"),
        ({"pool_devices": 0}, {}, "--pool_devices must be at least 1, got 0"),
        ({"pool_memory_gb": 0.0}, {}, "--pool_memory_gb must be above 0, got 0.0"),
        ({"tensor_parallel_size": 0}, {}, "--tensor_parallel_size must be at least 1, got 0"),
        ({"enable_lora": False, "lora_strategy": "split"}, {}, "--lora_strategy split needs --enable_lora: turn it on"),
        ({}, {"port": 70000}, "--port must be between 0 and 65535, got 70000"),
        ({}, {"api_key": ""}, "--api_key is empty"),
        ({}, {"api_key": "ü"}, "--api_key must be printable ASCII"),
        ({}, {"max_body_mb": 0.0}, "--max_body_mb must be above 0"),
        ({}, {"shutdown_timeout_s": -1.0}, "--shutdown_timeout_s must be at least 0"),
        ({}, {"max_prompts": 0}, "--max_prompts"),
        ({}, {"served_model_name": ("",)}, "--served_model_name is empty"),
        ({}, {"adapter_root": "/nowhere"}, "--adapter_root '/nowhere' is not a directory"),
        ({"enable_lora": False}, {"adapter_root": "/"}, "--adapter_root needs --enable_lora: turn it on, or leave"),
        ({}, {"adapter_root": "/", "host": "0.0.0.0"}, "set --adapter_routes"),
    ],
)
def test_check_names_what_cannot_be(engine, http, says):
    with pytest.raises(StartError) as caught:
        check(EngineConfig(**engine), HttpConfig(**http))
    assert says in str(caught.value)


def test_check_reports_every_problem_at_once():
    with pytest.raises(StartError, match=r"--max_num_seqs .*; --port .*; --api_key"):
        check(EngineConfig(max_num_seqs=0), HttpConfig(port=-1, api_key=" "))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (["a"], "write name=path"),
        (["=x"], "write name=path"),
        (["a="], "write name=path"),
        (["{"], "not valid JSON"),
        (['{"name": "a"}'], "write name=path"),
        (["a=x", "a=y"], "names 'a' twice"),
        (["../a=x"], "must not be a path"),
    ],
)
def test_lora_modules_of_another_form_are_refused(entries, says):
    with pytest.raises(StartError) as caught:
        parse_lora_modules(entries)
    assert says in str(caught.value)


def test_lora_modules_in_one_flag_are_refused_with_what_to_write():
    (problem,) = engine_problems(EngineConfig(), parse_lora_modules(["a=/no/x,b=/no/y"]))
    assert problem.endswith("the directory /no/x,b=/no/y does not exist; repeat the flag for each adapter")


def test_lora_modules_are_read_in_both_forms():
    entries = ["a=/x=1", json.dumps({"name": "b", "path": "/y", "base_model_name": "base"})]
    assert parse_lora_modules(entries) == {"a": "/x=1", "b": "/y"}


def test_shipped_adapters_belong_to_the_default_model_with_lora(tmp_path):
    (tmp_path / "pirate").mkdir()
    (tmp_path / "pirate" / "adapter_config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    assert shipped_adapters(EngineConfig(), tmp_path) == {"pirate": str(tmp_path / "pirate")}
    assert shipped_adapters(EngineConfig(model="/m"), tmp_path) == {}
    assert shipped_adapters(EngineConfig(enable_lora=False), tmp_path) == {}
    assert shipped_adapters(EngineConfig(), tmp_path / "absent") == {}


def test_template_is_read_from_a_file_or_taken_as_it_is(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert read_template(str(file)) == read_template("{{ messages }}") == "{{ messages }}"
    assert read_template(None) is None
    with pytest.raises(StartError, match=r"--chat_template .*absent\.jinja' cannot be read"):
        read_template(str(tmp_path / "absent.jinja"))


def test_template_that_is_not_jinja_is_refused_by_its_flag(tmp_path):
    file = tmp_path / "a.jinja"
    file.write_text("line\n{% endfor %}")
    for given, line in (("{% if %}", 1), (str(file), 2)):
        with pytest.raises(StartError) as caught:
            read_template(given)
        assert str(caught.value).startswith(
            f"--chat_template {given!r}: the chat template is not valid Jinja: line {line}: "
        )


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("x.org", "http://x.org:80"),
    ],
)
def test_server_url_is_one_that_a_client_here_can_use(host, url):
    assert server_url(host, 80) == url


def test_in_bytes_reads_well():
    assert [in_bytes(n) for n in (0, 999, 1000, 269e6, 1.07e9)] == ["0 B", "999 B", "1 kB", "269 MB", "1.07 GB"]


def test_model_that_is_not_there_fails_without_a_claim_that_it_was_loaded(tmp_path):
    out = io.StringIO()
    with pytest.raises(StartError, match="nowhere does not exist"):
        start_engine(
            EngineConfig(model="/nowhere", compilation_cache_dir=str(tmp_path)), {}, log=StageLog(Console(file=out))
        )
    assert out.getvalue() == "weights     loading the base model ...\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"pool_memory_gb": 1e-4, "pool_devices": 3},
            r"--pool_memory_gb 0\.0001 holds the keys and values of 192 tokens, fewer than one sequence of "
            r"--max_model_len 512: raise --pool_memory_gb to [\d.]+ or more, or lower --max_model_len",
        ),
        (
            {"pool_memory_gb": 3e-5, "pool_devices": 3},
            r"--pool_memory_gb 3e-05 is less than two pages of \d+ bytes on each of 3 pool devices: raise it to ",
        ),
        (
            {"pool_memory_gb": 100000.0},
            r"^--pool_memory_gb 100000\.0 asks for 100000\.0 GB of memory, and this machine has [\d.]+ GB: lower it$",
        ),
        (
            {"device_kv_mb": 10**9, "device_adapter_mb": 10**8},
            r"^--device_adapter_mb 100000000 asks for 97656\.2 GB of memory, and this machine has [\d.]+ GB: lower it; "
            r"--device_kv_mb 1000000000 asks for ",
        ),
        (
            {"tensor_parallel_size": 2},
            r"--tensor_parallel_size 2 needs as many devices, and this machine has 1 \(cpu\): lower it, or set XLA_",
        ),
    ],
)
def test_machine_or_memory_that_is_too_small_is_refused_with_what_to_change(options, says):
    with pytest.raises(StartError, match=says) as caught:
        start_engine(small_config(max_model_len=512, **options), {}, log=StageLog(Console(quiet=True)))
    assert "\n" not in str(caught.value)


def test_memory_that_runs_out_at_the_start_is_one_line(monkeypatch):
    def build(*_args, **_options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.\nand more")

    monkeypatch.setattr(startup, "build_engine", build)
    message = (
        "the memory ran out before the model was ready (RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.): lower "
        "--device_kv_mb, --device_adapter_mb, --pool_memory_gb or --max_num_batched_tokens"
    )
    with pytest.raises(StartError, match=f"^{re.escape(message)}$"):
        start_engine(small_config(), {}, log=StageLog(Console(quiet=True)))


def test_adapters_without_lora_are_refused_before_anything_is_loaded():
    with pytest.raises(StartError, match="--lora_modules needs --enable_lora"):
        start_engine(EngineConfig(model="/nowhere", enable_lora=False), {"a": "/a"}, log=StageLog(Console(quiet=True)))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/nonexistent", "--lora_modules a=/nonexistent: adapter 'a': the directory /nonexistent does not exist"),
        (str(ROOT), f"--lora_modules a={ROOT}: adapter 'a': {ROOT} has no adapter_model.safetensors"),
    ],
)
def test_adapter_whose_files_are_not_there_is_refused_before_anything_is_loaded(path, says):
    with pytest.raises(StartError, match=f"^{re.escape(says)}$"):
        check(EngineConfig(model="/nowhere"), HttpConfig(), {"a": path})


def test_stage_log_shows_a_bar_in_a_terminal_and_a_line_at_the_end():
    out = io.StringIO()
    log = StageLog(Console(file=out, force_terminal=True, width=80))
    log.stage("programs")
    log.advance(1, 2)
    log.advance(2, 2)
    log.end()
    assert "compiling programs" in out.getvalue()
    assert "programs    2 in 0.0 s" in out.getvalue()
