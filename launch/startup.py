"""From flags to an engine that is ready: what the server and the command line share."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import jax

from launch.console import StageLog, in_bytes
from launch.flags import StartError
from launch.http.adapter_paths import name_problem
from plora_jax.adapters import check_adapter_files
from plora_jax.checkpoints import DEFAULT_MODEL
from plora_jax.engine.build import Deployment, EngineConfig, build_engine
from plora_jax.tokenizer import ChatError, Tokenizer, check_syntax
from plora_jax.wording import shortened
from strategies.kernel_tables import describe_kernels

SHIPPED_ADAPTERS = pathlib.Path(__file__).parent / "default" / "adapters"
"""A PEFT directory for each adapter that comes with the default model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """Adapters that are there from the start.

    Attributes:
        lora_modules: an adapter as name=path, or as JSON {"name": ..., "path": ...}; repeatable.
    """

    lora_modules: tuple[str, ...] = ()


def parse_lora_modules(entries: Iterable[str]) -> dict[str, str]:
    """Paths of adapters by name.

    Raises:
        StartError: an entry has neither form, or a name comes twice.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, path = _parse_entry(entry)
        if name in found:
            raise StartError(f"--lora_modules names {name!r} twice: choose another name for one of them")
        problem = name_problem(name, ())
        if problem:
            raise StartError(f"--lora_modules {entry!r}: {problem}")
        found[name] = path
    return found


def _parse_entry(entry: str) -> tuple[str, str]:
    if entry.lstrip().startswith("{"):
        try:
            fields = json.loads(entry)
        except json.JSONDecodeError as error:
            raise StartError(f"--lora_modules {entry!r} is not valid JSON: {error.msg}") from error
        name, path = fields.get("name"), fields.get("path")
    else:
        name, _, path = entry.partition("=")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise StartError(f'--lora_modules {entry!r}: write name=path or {{"name": ..., "path": ...}}')
    return name, path


def shipped_adapters(config: EngineConfig, directory: pathlib.Path = SHIPPED_ADAPTERS) -> dict[str, str]:
    """Paths by name of the adapters that come with the default model; none for another model or without LoRA."""
    if config.model != DEFAULT_MODEL or not config.enable_lora:
        return {}
    return {file.parent.name: str(file.parent) for file in sorted(directory.glob("*/adapter_config.json"))}


def engine_problems(config: EngineConfig, adapters: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """What cannot be in a configuration before anything is read, and flags that have no use beside the others.

    Args:
        config: of the engine.
        adapters: paths by name of those that are to be loaded.
    """
    problems = []
    try:
        config.validate()
    except ValueError as error:
        problems.append(str(error))
    if not config.enable_lora and adapters:
        problems.append("--lora_modules needs --enable_lora: turn it on, or leave the adapters out")
    if not config.enable_lora and config.lora_strategy != "auto":
        problems.append(
            f"--lora_strategy {config.lora_strategy} needs --enable_lora: turn it on, or leave the strategy out"
        )
    for name, path in adapters.items() if config.enable_lora else ():
        try:
            check_adapter_files(path, name=name)
        except (ValueError, OSError) as error:
            several = "; repeat the flag for each adapter" if "=" in path.partition(",")[2] else ""
            problems.append(f"--lora_modules {name}={path}: {error}{several}")
    return problems


def start_engine(
    config: EngineConfig,
    adapters: Mapping[str, str],
    *,
    log: StageLog,
    model_name: str | None = None,
    shipped: Mapping[str, str] | None = None,
) -> Deployment:
    """Builds the engine, loads adapters, starts it, and prints what memory goes where.

    Args:
        config: of the engine.
        adapters: paths by name; each must load.
        log: told what goes on.
        model_name: name of the base model; by default that of its path.
        shipped: more adapters; one that this configuration cannot hold is left out with a line that says so.

    Raises:
        StartError: the model or an adapter cannot be served as configured.
    """
    problems = engine_problems(config, adapters)
    if problems:
        raise StartError("; ".join(problems))
    try:
        deployment = build_engine(config, model_name=model_name, progress=log)
    except (ValueError, OSError) as error:
        log.end(failed=True)
        raise StartError(str(error)) from error
    except BaseException as error:
        log.end(failed=True)
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            raise StartError(
                f"the memory ran out before the model was ready ({str(error).splitlines()[0]}): lower "
                "--device_kv_mb, --device_adapter_mb, --pool_memory_gb or --max_num_batched_tokens"
            ) from error
        raise
    log.end()
    _load_adapters(deployment, adapters, {} if shipped is None else shipped, log=log)
    _print_memory(deployment, log)
    deployment.engine.start()
    return deployment


def read_template(given: str | None) -> str | None:
    """The text of --chat_template, which names a file, holds the template, or names one of the model's.

    Raises:
        StartError: the file cannot be read, or the template is not valid Jinja.
    """
    if given is None:
        return None
    if "{" in given or "\n" in given:
        return _checked_template(given, given)
    path = pathlib.Path(given).expanduser()
    if not path.suffix and not path.exists():
        return given
    try:
        return _checked_template(path.read_text(encoding="utf-8"), given)
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--chat_template {given!r} cannot be read: {error}") from error


def _checked_template(template: str, given: str) -> str:
    try:
        check_syntax(template)
    except ChatError as error:
        raise StartError(f"--chat_template {shortened(given)!r}: {error}") from error
    return template


def check_template(tokenizer: Tokenizer, template: str | None) -> None:
    """Raises StartError where a name of a template names none of the model's."""
    if template is None or "{" in template or template in tokenizer.chat_templates:
        return
    known = ", ".join(sorted(tokenizer.chat_templates)) or "none"
    raise StartError(f"--chat_template {template!r} is no file and none of the model's templates ({known})")


def _load_adapters(
    deployment: Deployment, adapters: Mapping[str, str], shipped: Mapping[str, str], *, log: StageLog
) -> None:
    wanted = {**shipped, **adapters}
    if not wanted:
        return
    log.stage("adapters")
    for number, (name, path) in enumerate(wanted.items(), start=1):
        try:
            deployment.engine.load_adapter(name, path)
        except (ValueError, OSError) as error:
            if name in adapters:
                log.end(failed=True)
                raise StartError(f"adapter {name!r} from {path}: {error}") from error
            log.say("left out", f"adapter {name!r}: {error}")
        log.advance(number, len(wanted))
    log.end()


def _print_memory(deployment: Deployment, log: StageLog) -> None:
    model, limits = deployment.model, deployment.engine.scheduler_config
    words = f"{model.architecture}, {model.num_layers} layers, {deployment.precision}"
    log.say("model", f"{deployment.engine.model_name}: {words}")
    sizes = deployment.device_bytes()
    parts = ", ".join(f"{what} {in_bytes(size)}" for what, size in sizes.items())
    log.say("memory", f"{in_bytes(sum(sizes.values()))} on the device: {parts}")
    taken = ", ".join(f"{what} {in_bytes(size)}" for what, size in deployment.pool_bytes().items())
    where = " of device memory" if deployment.probe.emulation else ""
    log.say("pool", f"{in_bytes(deployment.memory.pool.nbytes)}{where}, of it taken: {taken}")
    tokens = deployment.kv_tokens
    log.say("context", f"{limits.max_model_len} tokens a sequence; the pool has room for the KV of {tokens} tokens")
    log.say("kernels", describe_kernels(deployment.executor.kernels, layout=deployment.memory.layout))
    log.say("link", deployment.probe.as_text())
    log.say("planner", deployment.planning or "off: both strategies are forced")
