"""What an adapter may ask for that is not served: one table line per feature, refused by name.

Every field of adapter_config.json is in one of three tables: used, harmless, or that of a feature. Any other field is
an error unless it is empty. A feature shows in a field or, with a clean configuration, only in the tensors; both are
looked for. To serve a feature, take its line out of `FEATURES` and put its fields into `USED_FIELDS`.

Source: peft 0.21 `tuners/lora/config.py`, `utils/save_and_load.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from plora_jax.adapters.adapter import AdapterError

USED_FIELDS = frozenset(
    {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "ensure_weight_tying"}
)

HARMLESS_FIELDS = frozenset(
    {
        # Where it came from and how it was trained.
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "merge_weights",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
        # Which modules were trained: the tensors say it.
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "target_modules",
        # Without effect unless another field, refused below, switches them on.
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        "qalora_group_size",
    }
)

_MERGE = "merge it into the base model (merge_and_unload in PEFT) and serve that"
_LATER = "train without it, or merge it into the base model (merge_and_unload in PEFT) and serve that"
_ONLY_LORA = "train plain LoRA"


class Feature(NamedTuple):
    """A feature that is refused.

    Attributes:
        name: what messages call it.
        fields: of adapter_config.json that ask for it.
        tensors: regex that finds its tensors' names, or None where it has none of its own.
        advice: what the user can do.
    """

    name: str
    fields: tuple[str, ...]
    tensors: str | None
    advice: str


FEATURES = (
    # The first line that finds a tensor gives it its name: the special ones stand first.
    Feature("DoRA", ("use_dora",), r"\.lora_magnitude_vector\b", _LATER),
    Feature("KaSA", ("kasa_config",), r"\.lora_diag\b", _ONLY_LORA),
    Feature("VeLoRA", ("velora_config",), r"\.lora_velora_", _ONLY_LORA),
    Feature("MonteCLoRA", ("monteclora_config",), r"monteclora", _ONLY_LORA),
    Feature("trainable tokens", ("trainable_token_indices",), r"trainable_tokens|token_adapter\.", _LATER),
    Feature("lora_bias", ("lora_bias",), r"\.lora_B(\.[^.]+)?\.bias$", _LATER),
    Feature("MoE expert LoRA", ("target_parameters",), r"\.experts\b.*\.lora_", "train attention only"),
    Feature("MoE router LoRA", (), r"\.(mlp|block_sparse_moe)\.(gate|router)\.lora_", "train attention only"),
    Feature("full embedding weights", (), r"\bembed_tokens\.(?!.*\blora_).*weight$", "save without embeddings"),
    Feature("full head weights", (), r"\blm_head\.(?!.*\blora_).*weight$", "save without lm_head"),
    Feature("bias", ("bias",), r"\.bias$", "train with bias='none'"),
    Feature("modules_to_save", ("modules_to_save",), r"\.modules_to_save\.|^(?!.*\blora_).*\.weight$", _MERGE),
    Feature("aLoRA", ("alora_invocation_tokens",), None, _ONLY_LORA),
    Feature("layer_replication", ("layer_replication",), None, "serve the enlarged model as its own base"),
    Feature("QALoRA", ("use_qalora",), None, _MERGE),
    Feature("BD-LoRA", ("use_bdlora",), None, _ONLY_LORA),
    Feature("Arrow routing", ("arrow_config",), None, "load its experts as adapters of their own"),
    Feature("Megatron layers", ("megatron_config",), None, "convert it to Hugging Face names and drop the field"),
    Feature("fan_in_fan_out", ("fan_in_fan_out",), None, "set it to false: every linear layer here is (out, in)"),
    Feature("enable_lora", ("enable_lora",), None, "save it again with PEFT 0.3 or later"),
)

_CONVERT = (
    "it is relative to another base; convert it in PEFT with "
    "save_pretrained(PATH, path_initial_model_for_weight_conversion=INITIAL_ADAPTER)"
)
CHANGED_BASE = {
    "pissa": ("PiSSA", _CONVERT),
    "olora": ("OLoRA", _CONVERT),
    "corda": ("CorDA", _CONVERT),
    "lora_ga": ("LoRA-GA", _CONVERT),
    "loftq": ("LoftQ", "it is relative to a quantised base; train on the base that is served"),
}
"""Initialisations, by how their value starts, that subtract from the base's weights what they put into A and B."""

SAME_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Initialisations that leave the base's weights alone; after training they are plain LoRA."""

_NEUTRAL = {"bias": "none"}


def refuse_unserved(name: str, fields: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Raises when an adapter has a feature that is not served.

    Args:
        name: of the adapter.
        fields: adapter_config.json.
        tensors: names of tensors that are no A or B of a linear layer of the base model.

    Returns:
        Those of the tensors that no feature explains.

    Raises:
        AdapterError: every such feature with its fields and tensors, and what to do.
    """
    asked = [f for f in fields if not _neutral(f, fields[f])]
    found, rest = _sort_tensors(tensors)
    problems = [_problem(f.name, _evidence(f, fields, asked, found[f.name]), f.advice) for f in FEATURES]
    problems = [p for p in problems if p] + _initialisation(fields.get("init_lora_weights"))
    known = USED_FIELDS | HARMLESS_FIELDS | {"init_lora_weights"} | {f for row in FEATURES for f in row.fields}
    problems += [
        f"the unknown field {f}={_show(fields[f])}: save it again with PEFT 0.21 or before"
        for f in asked
        if f not in known
    ]
    if problems:
        raise AdapterError(f"adapter {name!r} needs what this server does not serve: {'; '.join(problems)}")
    return rest


def listed(names: list[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _neutral(field: str, value: Any) -> bool:
    # An unknown field's default is not known; "nothing", "no" and "empty" are what PEFT uses for what is not asked for.
    return value is None or value is False or value in ("", [], {}) or value == _NEUTRAL.get(field)


def _sort_tensors(tensors: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    found: dict[str, list[str]] = {row.name: [] for row in FEATURES}
    rest = []
    for tensor in tensors:
        row = next((row for row in FEATURES if row.tensors and re.search(row.tensors, tensor)), None)
        (rest if row is None else found[row.name]).append(tensor)
    return found, rest


def _evidence(row: Feature, fields: Mapping[str, Any], asked: list[str], tensors: list[str]) -> list[str]:
    evidence = [f"field {f}={_show(fields[f])}" for f in row.fields if f in asked]
    return evidence + ([f"tensor {listed(tensors, limit=2)}"] if tensors else [])


def _problem(feature: str, evidence: list[str], advice: str) -> str:
    return f"{feature} ({'; '.join(evidence)}): {advice}" if evidence else ""


def _initialisation(value: Any) -> list[str]:
    if value is None or isinstance(value, bool) or str(value).lower() in SAME_BASE:
        return []
    evidence = [f"field init_lora_weights={_show(value)}"]
    for start, (feature, advice) in CHANGED_BASE.items():
        if str(value).lower().startswith(start):
            return [_problem(f"{feature} initialisation", evidence, advice)]
    return [_problem("an unknown initialisation", evidence, "convert it to plain LoRA; then set the field to true")]


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
