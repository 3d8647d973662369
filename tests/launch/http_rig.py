"""A server over the real engine and a scripted executor: what the HTTP tests share.

Tokens are bytes (id = byte, 256 and 257 open and end a chat turn), so that texts are easy to foresee. The executor says
"Hello wörld! 1 2 3" and ends; an adapter's answer starts with its load's mark; prompts with "random" get tokens hashed
from seed and past.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import tokenizers
from starlette.testclient import TestClient
from tokenizers import decoders, models, pre_tokenizers

from launch.http import HttpConfig, ServerState, create_app
from launch.http.metrics import Metrics, MetricSources
from launch.http.server import Server, open_socket
from plora_jax.adapters.adapter import Adapter, AdapterError
from plora_jax.engine import Engine, Sequence
from plora_jax.engine.placement import PlacementPlanner
from plora_jax.tokenizer import Tokenizer
from tests.plora_jax.engine_fakes import FakeExecutor, FakeKv, FakeStore, hashed_token, make_config, make_kv

REPLY = "Hello wörld! 1 2 3"
IM_START, IM_END = 256, 257
VOCAB = 258
CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    letters = {chr(c): c for c in (*range(33, 127), *range(161, 173), *range(174, 256))}
    # GPT-2's table: the other bytes are written as the letters from U+0100 on.
    rest = (b for b in range(256) if b not in letters.values())
    vocab = letters | {chr(256 + i): b for i, b in enumerate(rest)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, {"eos_token": "<|im_end|>", "chat_template": TEMPLATE})


def scripted_token(seq: Sequence) -> int:
    if b"random" in bytes(t for t in seq.prompt_ids if t < 256):
        return 32 + hashed_token(seq) % 90
    said = (f"[{seq.adapter_id}]" if seq.adapter_id else "").encode() + REPLY.encode()
    at = len(seq.output_ids)
    if seq.sampling.ignore_eos:
        return said[at % len(said)]
    return said[at] if at < len(said) else IM_END


def read_adapter(name: str, path: str) -> Adapter:
    """Reads nothing but the file that must be there; refuses what says so."""
    config = json.loads((pathlib.Path(path) / "adapter_config.json").read_text())
    if "refuse" in config:
        raise AdapterError(f"adapter {name!r} {config['refuse']}")
    return Adapter(name, {}, config, path)


@dataclasses.dataclass
class HttpRig:
    """A server's parts; the engine runs in its thread."""

    engine: Engine
    executor: FakeExecutor
    kv: FakeKv
    state: ServerState

    def client(self) -> TestClient:
        return TestClient(create_app(self.state), raise_server_exceptions=False)

    def slow_down(self, step_s: float) -> None:
        self.executor.before_step = lambda plan: time.sleep(step_s)

    def wait_idle(self, within_s: float = 5.0) -> None:
        """Waits until nothing is in flight, then checks that everything was given back."""
        until_s = time.monotonic() + within_s
        while (stats := self.engine.stats()).running or stats.waiting or self.state.flights:
            assert time.monotonic() < until_s, f"still in flight: {stats}"
            time.sleep(0.01)
        self.kv.check_all_given_back()


@contextlib.contextmanager
def http_rig(*, planner: PlacementPlanner | None = None, **options: object) -> Iterator[HttpRig]:
    """A rig; `options` are fields of HttpConfig, or of SchedulerConfig where they are named there."""
    limits = {"max_num_seqs": 8, "max_model_len": CONTEXT, "max_num_batched_tokens": 64, "max_prefill_tokens": 64}
    limits |= {name: options.pop(name) for name in list(options) if name in ("max_num_seqs", "max_waiting")}
    config, tokenizer = make_config(**limits), byte_tokenizer()
    executor = FakeExecutor(config, scripted_token)
    kv = make_kv(executor, page_tokens=config.page_tokens, pool_pages=1024)
    engine = Engine(
        executor=executor,
        scheduler_config=config,
        kv=kv.kv,
        tokenizer=tokenizer,
        adapters=FakeStore(4),
        load_adapter=read_adapter,
        vocab_size=VOCAB,
        eos_token_ids=(IM_END,),
        model_name="base",
        planner=planner,
    )
    state = ServerState(
        engine=engine,
        tokenizer=tokenizer,
        config=HttpConfig(**options),
        model_names=("base",),
        model_root="/models/base",
        max_model_len=CONTEXT,
        metrics=Metrics(engine, "base", MetricSources(compilations=lambda: 7, near_data_failures=lambda: 2)),
    )
    engine.start()
    try:
        yield HttpRig(engine, executor, kv, state)
    finally:
        engine.shutdown()


@dataclasses.dataclass
class LiveServer:
    url: str
    server: Server
    thread: threading.Thread

    def openai(self, **options: object) -> openai.OpenAI:
        # Retries would hide what the server says.
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


@contextlib.contextmanager
def live_server(state: ServerState) -> Iterator[LiveServer]:
    """Serves on a free port, in a thread."""
    listening, started = open_socket("127.0.0.1", 0), threading.Event()
    port = listening.getsockname()[1]
    server = Server(state, on_started=started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield LiveServer(f"http://127.0.0.1:{port}", server, thread)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
