"""Measures what a dtype and a quantisation cost in quality: perplexity on a text, against float32.

  python -m launch.bench quality
      the default model as float32, bfloat16, with int8 weights, in the 4-bit blocks of its file and with an int8 KV
      cache, on the text that comes with the project

  python -m launch.bench quality --model=/models/llama --precisions=bfloat16+int8 --text=notes.txt --output_json=q.json

  python -m launch.bench quality --adapter=launch/default/adapters/pirate --precisions=bfloat16,bfloat16+int8lora
      the default model with an adapter, as bfloat16 and as int8

A precision is a dtype, with +int8 or +gguf for weights as `--quantization` has them, +int8lora for an adapter as by
`--lora_dtype int8`, and +int8kv for keys and values as by `--kv_cache_dtype int8`; each is multiplied as it is served,
but products with an adapter are float32. The text is cut into windows that know nothing of each other; all precisions
see the same tokens. The loss is the rise in perplexity over float32,
with the standard error of it over tokens. The text of the project is the start of Lewis Carroll's Alice's Adventures in
Wonderland, which is in the public domain. Progress goes to standard error, the report to standard output.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import shlex
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from launch import flags
from launch.benchmarks.machine import describe_machine, describe_software
from launch.benchmarks.output import output_problems, write_json
from launch.console import StageLog
from launch.flags import StartError
from memory_pool.int8_adapters import quantize_modules
from plora_jax.adapters import OUTSIDE, Adapter, load_adapter
from plora_jax.checkpoints import DEFAULT_MODEL, LoadedModel, find_model, load_config, load_model
from plora_jax.config import ModelConfig
from plora_jax.model import (
    QUANTIZATIONS,
    LoraWeights,
    Params,
    forward_full,
    keeps_blocks,
    pack_params,
    quantization_problem,
)
from plora_jax.parallel import TensorParallel
from plora_jax.tokenizer import load_tokenizer

TEXT = pathlib.Path(__file__).parent / "texts" / "alice.txt"
REFERENCE = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityCase:
    """What to measure.

    Attributes:
        model: base model, as for `serve`.
        precisions: by comma, beside float32: bfloat16 or float32, each also with +int8 or +gguf, then with +int8lora,
            then with +int8kv.
        adapter: directory of an adapter that changes the model; None for the model alone.
        text: file to measure on; None for the text of the project.
        windows: windows of the text, as far as it goes.
        window_tokens: tokens of a window.
        output_json: file for the figures.
    """

    model: str = DEFAULT_MODEL
    precisions: str = "bfloat16,float32+int8,bfloat16+int8,bfloat16+gguf,bfloat16+int8kv"
    adapter: str | None = None
    text: str | None = None
    windows: int = 16
    window_tokens: int = 512
    output_json: str | None = None


class Precision(NamedTuple):
    """What is measured beside float32.

    Attributes:
        dtype: of weights and activations.
        quantization: of the weights.
        int8_kv: keys and values are rounded to int8.
        int8_adapters: the adapter is rounded to int8.
    """

    dtype: str
    quantization: str = "none"
    int8_kv: bool = False
    int8_adapters: bool = False

    @property
    def name(self) -> str:
        """As `parse_precisions` reads it."""
        weights = "" if self.quantization == "none" else f"+{self.quantization}"
        return f"{self.dtype}{weights}{'+int8lora' * self.int8_adapters}{'+int8kv' * self.int8_kv}"


class Quality(NamedTuple):
    """One precision.

    Attributes:
        precision: as `Precision.name` has it.
        perplexity: of the text.
        loss: rise in perplexity over float32, 0.01 for 1 %.
        error: standard error of `loss`.
        weight_bytes: of the weights as they serve.
    """

    precision: str
    perplexity: float
    loss: float
    error: float
    weight_bytes: int


def define_flags() -> None:
    """One flag for each option."""
    flags.define(QualityCase)


def parse_precisions(text: str) -> list[Precision]:
    """Each once, float32 first.

    Raises:
        StartError: one that is not known.
    """
    known = {
        precision.name: precision
        for dtype in (REFERENCE, "bfloat16")
        for quantization in QUANTIZATIONS
        for kinds in itertools.product((False, True), repeat=2)
        for precision in (Precision(dtype, quantization, *kinds),)
    }
    entries = [entry for part in text.split(",") if (entry := part.strip())]
    if unknown := [entry for entry in entries if entry not in known]:
        kinds = " or ".join(f"+{quantization}" for quantization in QUANTIZATIONS if quantization != "none")
        raise StartError(
            f"--precisions {unknown[0]!r} is no precision: take float32 or bfloat16, then what you want of {kinds}, of "
            "+int8lora, of +int8kv"
        )
    return [known[name] for name in dict.fromkeys([REFERENCE, *entries])]


def measure_quality(case: QualityCase, *, log: StageLog) -> list[Quality]:
    """Measures every precision of a case, float32 first.

    Raises:
        StartError: the model or the text cannot be measured.
    """
    precisions = parse_precisions(case.precisions)
    if case.windows < 1 or case.window_tokens < 2:
        raise StartError(
            f"--windows {case.windows} and --window_tokens {case.window_tokens} leave nothing to predict: at least 1 "
            "and 2 are needed"
        )
    if problems := output_problems(case.output_json):
        raise StartError(problems[0])
    if case.adapter is None and (of_adapter := [p.name for p in precisions if p.int8_adapters]):
        raise StartError(f"--precisions {of_adapter[0]!r} rounds an adapter, and there is none: name one by --adapter")
    try:
        config = load_config(case.model)
        problems = {quantization_problem(config, precision.quantization) for precision in precisions} - {None}
        if problems:
            raise StartError(f"--precisions {case.precisions}: {problems.pop()}")
        tokens_BT = _windows(case)
        adapter = None if case.adapter is None else _adapter(case.adapter, config)
        found: list[Quality] = []
        reference = np.zeros(0)
        for precision in precisions:
            kept = keeps_blocks(TensorParallel(config), precision.quantization)
            loaded = load_model(case.model, dtype=precision.dtype, keep_blocks=kept)
            losses, size = _token_losses(loaded, adapter, precision, tokens_BT)
            reference = reference if found else losses
            found.append(_quality(precision, losses, reference, size))
            log.say(found[-1].precision, f"perplexity {found[-1].perplexity:.3f}")
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error
    return found


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case = flags.read(QualityCase)
    found = measure_quality(case, log=StageLog(Console(stderr=True)))
    command = shlex.join(["python", "-m", "launch.bench", "quality", *sys.argv[1:]])
    print(as_text(case, found, command=command))
    write_json(case.output_json, as_json(case, found, command=command))
    return 0


def as_json(case: QualityCase, found: list[Quality], *, command: str) -> dict[str, Any]:
    """Everything, as plain values."""
    return {
        "benchmark": "quality",
        "options": dataclasses.asdict(case),
        "precisions": [quality._asdict() for quality in found],
        "machine": describe_machine(),
        "software": describe_software(),
        "command": command,
    }


def as_text(case: QualityCase, found: list[Quality], *, command: str) -> str:
    """The same for people: a line for each precision."""
    lines = [
        f"{'model':<16} {case.model}",
        *([f"{'adapter':<16} {case.adapter}"] if case.adapter else []),
        f"{'text':<16} {case.text or TEXT.name}, {case.windows} windows of {case.window_tokens} tokens at most",
        "",
        f"{'precision':<29} {'perplexity':>10} {'loss, %':>9} {'+-':>6} {'weights, MB':>12}",
    ]
    for q in found:
        loss = f"{100 * q.loss:>9.2f} {100 * q.error:>6.2f}"
        lines.append(f"{q.precision:<29} {q.perplexity:>10.3f} {loss} {q.weight_bytes / 1e6:>12.1f}")
    return "\n".join([*lines, "", f"{'command':<16} {command}"])


def _windows(case: QualityCase) -> np.ndarray:
    path = TEXT if case.text is None else pathlib.Path(case.text).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--text {str(path)!r} cannot be read: {error}") from error
    ids = load_tokenizer(find_model(case.model)).encode(text)
    count = min(case.windows, len(ids) // case.window_tokens)
    if count == 0:
        raise StartError(f"the text has {len(ids)} tokens, fewer than --window_tokens {case.window_tokens}: lower it")
    return np.asarray(ids[: count * case.window_tokens], np.int32).reshape(count, case.window_tokens)


def _adapter(path: str, config: ModelConfig) -> Adapter:
    adapter = load_adapter(path, name="measured", config=config)
    if outside := [module.path for module in adapter.modules if module.layer == OUTSIDE]:
        raise StartError(f"--adapter {path!r} changes {outside[0]}: only adapters of the layers can be measured")
    return adapter


def _dense(adapter: Adapter, config: ModelConfig, precision: Precision) -> LoraWeights:
    """An adapter as its numbers are kept; factors are in B, [L, O, R] float32."""
    a, b = {}, {}
    for name in sorted({module.projection for module in adapter.modules}):
        found = {m.layer: matrices for m, matrices in adapter.modules.items() if m.projection == name}
        if precision.int8_adapters:
            found = quantize_modules(found)
        some = next(iter(found.values()))
        rank = max(len(m.a) for m in found.values())
        a[name] = np.zeros((config.num_layers, rank, some.a.shape[1]), np.float32)
        b[name] = np.zeros((config.num_layers, len(some.b), rank), np.float32)
        for layer, m in found.items():
            kept = (side if precision.int8_adapters else side.astype(jnp.dtype(precision.dtype)) for side in (m.a, m.b))
            a[name][layer, : len(m.a)], b[name][layer, :, : len(m.a)] = kept
            b[name][layer] *= m.scale
    return LoraWeights(a, b, 1.0)


def _token_losses(
    loaded: LoadedModel, adapter: Adapter | None, precision: Precision, tokens_BT: np.ndarray
) -> tuple[np.ndarray, int]:
    """Negative log likelihood of every token but the first of a window, and the bytes of the weights."""
    lora = None if adapter is None else _dense(adapter, loaded.config, precision)
    params = pack_params(loaded.params, TensorParallel(loaded.config), quantization=precision.quantization)
    dtype, int8_kv = jnp.dtype(loaded.dtype), precision.int8_kv

    @jax.jit
    def losses(params: Params, lora: LoraWeights | None, tokens_T: jax.Array) -> jax.Array:
        logits = forward_full(params, loaded.config, tokens_T[None], lora=lora, dtype=dtype, int8_kv=int8_kv)[0, :-1]
        chosen = jnp.take_along_axis(logits, tokens_T[1:, None], -1)[:, 0]
        return jax.nn.logsumexp(logits, -1) - chosen

    found = np.stack([np.asarray(losses(params, lora, tokens_T)) for tokens_T in tokens_BT])
    return found.astype(np.float64), sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _quality(precision: Precision, losses: np.ndarray, reference: np.ndarray, size: int) -> Quality:
    rise = losses - reference
    ratio = math.exp(rise.mean())
    return Quality(precision.name, math.exp(losses.mean()), ratio - 1, ratio * rise.std() / math.sqrt(rise.size), size)
