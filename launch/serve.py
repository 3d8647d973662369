r"""Serves one base model and its LoRA adapters over an OpenAI-compatible HTTP API.

  python -m launch.serve
      the default model and its adapters on http://127.0.0.1:8000

  python -m launch.serve --model /models/llama --lora_modules sql=/adapters/sql --lora_modules law=/adapters/law
      a model of your own; clients choose an adapter with "model": "sql"

  python -m launch.serve --adapter_root /adapters
      adapters under /adapters can be loaded while the server runs:
      curl http://127.0.0.1:8000/v1/load_lora_adapter -H "Content-Type: application/json" \
        -d '{"lora_name": "law", "lora_path": "law"}'

  python -m launch.serve --host 0.0.0.0 --flagfile server.flags
      flags from a file, one a line; keeps --api_key out of the list of processes

  python -m launch.serve --profile_dir /tmp/trace
      also a trace of the first steps of traffic, by operation, with the names of the parts of a step

SIGTERM or Ctrl-C ends it: running answers get --shutdown_timeout_s to finish. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from types import MappingProxyType

from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.console import StageLog
from launch.flags import StartError
from launch.greeting import print_greeting
from launch.http import HttpConfig, ServerState, serve_app
from launch.http.adapter_paths import name_problem
from launch.http.metrics import Metrics, MetricSources
from launch.http.server import AddressError, open_socket
from launch.profiling import HOW_TO_OPEN, ProfileConfig, StepProfiler, keep_names_in_programs
from launch.startup import (
    AdapterFlags,
    check_template,
    engine_problems,
    parse_lora_modules,
    read_template,
    shipped_adapters,
    start_engine,
)
from plora_jax.engine.build import Deployment, EngineConfig
from plora_jax.engine.compile import counter


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each field of the dataclasses that a server is made of."""
    for config_class in (EngineConfig, HttpConfig, AdapterFlags, ProfileConfig):
        flags.define(config_class, flag_values=flag_values)


def main() -> int:
    """Runs the server that the flags describe until a signal ends it."""
    engine_config, http_config, profile = flags.read(EngineConfig), flags.read(HttpConfig), flags.read(ProfileConfig)
    adapters = parse_lora_modules(flags.read(AdapterFlags).lora_modules)
    template = read_template(http_config.chat_template)
    check(engine_config, http_config, adapters, profile=profile)
    try:
        listening = open_socket(http_config.host, http_config.port)
    except AddressError as error:
        raise StartError(str(error)) from error
    log = StageLog(Console())
    profiler = None if profile.profile_dir is None else make_profiler(profile, log=log)
    deployment = start_engine(
        engine_config,
        adapters,
        log=log,
        model_name=next(iter(http_config.served_model_name), None),
        shipped=shipped_adapters(engine_config),
    )
    state = make_state(deployment, http_config, template=template)
    if profiler is not None:
        profiler.watch(deployment.executor)
    status = run_server(state, listening, log=log)
    if profiler is not None:
        profiler.close()
    return status


def make_profiler(profile: ProfileConfig, *, log: StageLog) -> StepProfiler:
    """Traces the first steps of traffic and says where the trace is; to be made before the engine is.

    Raises:
        StartError: the directory cannot be made.
    """
    keep_names_in_programs()
    return StepProfiler(
        profile.profile_dir or "",
        steps=profile.profile_steps,
        on_done=lambda directory: log.say("trace", f"{directory}: {HOW_TO_OPEN} {directory}"),
    )


def check(
    engine: EngineConfig,
    http: HttpConfig,
    adapters: Mapping[str, str] = MappingProxyType({}),
    *,
    profile: ProfileConfig | None = None,
) -> None:
    """Raises StartError naming every value that cannot be.

    Args:
        engine: flags of the engine.
        http: flags of the server.
        adapters: paths by name of those that are to be loaded.
        profile: flags of traces.
    """
    problems = [*engine_problems(engine, adapters), *http.problems(), *(profile.problems() if profile else ())]
    if http.adapter_root is not None and not os.path.isdir(http.adapter_root):
        problems.append(f"--adapter_root {http.adapter_root!r} is not a directory")
    if http.adapter_root is not None and not engine.enable_lora:
        problems.append("--adapter_root needs --enable_lora: turn it on, or leave the directory out")
    if http.adapter_root is not None and not http.adapter_routes_on:
        problems.append(
            f"--adapter_root has no use while adapters cannot be loaded over HTTP, which is so on host {http.host}: "
            "set --adapter_routes, best together with --api_key"
        )
    if problems:
        raise StartError("; ".join(problems))


def make_state(deployment: Deployment, http: HttpConfig, *, template: str | None) -> ServerState:
    """What the routes share, over an engine that is built.

    Raises:
        StartError: a served name is that of an adapter, or the chat template does not exist.
    """
    engine = deployment.engine
    names = tuple(dict.fromkeys(http.served_model_name)) or (engine.model_name,)
    for status in engine.adapters():
        problem = name_problem(status.name, names)
        if problem:
            raise StartError(f"adapter {status.name!r}: {problem}")
    check_template(engine.tokenizer, template)
    sizes, adapters = deployment.device_bytes(), deployment.adapters
    sources = MetricSources(
        compilations=lambda: counter.count,
        link_totals=deployment.ledger.totals,
        pool_bytes=deployment.pool_bytes,
        device_cache_bytes=lambda: {what: size for what, size in sizes.items() if what in ("adapter", "kv")},
        num_kv_pages=deployment.kv_tokens // deployment.config.page_tokens,
        kv_cache_dtype=deployment.config.kv_cache_dtype,
        fallbacks=None if adapters is None else lambda: adapters.fallbacks,
        near_data_failures=lambda: deployment.near_data.failures,
    )
    return ServerState(
        engine=engine,
        tokenizer=engine.tokenizer,
        config=http,
        model_names=names,
        model_root=deployment.config.model,
        max_model_len=engine.max_model_len,
        metrics=Metrics(engine, names[0], sources),
        chat_template=template,
    )


def run_server(state: ServerState, listening: socket.socket, *, log: StageLog) -> int:
    """Answers requests until a signal; then ends the engine."""
    port = listening.getsockname()[1]
    try:
        ended = serve_app(state, listening, on_started=lambda: print_greeting(state, port, log=log))
    except AddressError as error:
        raise StartError(str(error)) from error
    if not ended:
        # The operator asked twice: nothing may hold the process, the engine's step neither.
        os._exit(130)
    log.say("stopped", "all requests are answered or cancelled")
    state.engine.shutdown()
    return 0


def cli() -> None:
    define_flags()
    flags.run(main)


if __name__ == "__main__":
    cli()
