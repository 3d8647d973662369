"""LoRA outside the layers, on the embedding and the head: what PEFT adds to it, held against the base model.

PEFT saves a copy of the base's embedding or head beside LoRA of it, and puts that copy in the base's place when it
loads the adapter. A copy that says the same is dropped; any other is full embedding weights, and refused.

With tied weights PEFT changes the two places apart, unless `ensure_weight_tying` makes the head's matrices the
transposed ones of the embedding; it then saves both, and both are served as they are.

Gemma scales its embeddings: PEFT since 0.18 scales what LoRA adds to them too, as the model does here (base + change,
then the scale), for Gemma 2 and Gemma 3 alike. Before, it did not for Gemma 3; such an adapter is served as PEFT 0.21
serves it.

Source: peft 0.21 `utils/save_and_load.py:get_peft_model_state_dict`, `tuners/lora/model.py:_create_and_replace`,
`_add_targets_to_tie`, `tuners/lora/layer.py:Embedding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from plora_jax.adapters.adapter import EMBEDDING, HEAD, OUTSIDE, AdapterError, LoraMatrices, ModuleId
from plora_jax.config import ModelConfig

BaseWeights = Callable[[], Mapping[str, Any]]
"""Gives the parameter tree of the base model; called only when there is a copy to compare."""

_ROWS = 8192  # compared at a time: of a width of 4096 in float32 they are 128 MB
_SEPARATE = "save it without them (save_pretrained(PATH, save_embedding_layers=False) in PEFT) if they are the base's"


def check_base_copies(
    file: Any, copies: Mapping[str, str], base_weights: BaseWeights | None, *, config: ModelConfig, name: str
) -> None:
    """Checks that copies of base weights are what the base model has.

    Args:
        file: the opened tensors.
        copies: name of the copy by leaf.
        base_weights: of the base model; None takes a copy of the right shape for the base's own.
        config: of the base model.
        name: of the adapter.

    Raises:
        AdapterError: a copy has another shape or other numbers.
    """
    for leaf, tensor in copies.items():
        copy = file.get_slice(tensor)
        wanted = [config.vocab_size, config.hidden_size]
        if list(copy.get_shape()) != wanted:
            raise _full_weights(name, leaf, tensor, f"has shape {list(copy.get_shape())}; that of the base is {wanted}")
        if base_weights is None:
            continue
        params = base_weights()
        tied = leaf == EMBEDDING or config.tie_word_embeddings
        base = np.asarray(params["embedding" if tied else "head"])
        ends = [(start, min(start + _ROWS, len(base))) for start in range(0, len(base), _ROWS)]
        changed = sum(_changed_rows(copy[start:stop], base[start:stop]) for start, stop in ends)
        if changed:
            raise _full_weights(name, leaf, tensor, f"differs from the base in {changed} of {len(base)} rows")


def check_weight_tying(
    fields: Mapping[str, Any], modules: Mapping[ModuleId, LoraMatrices], config: ModelConfig, *, name: str
) -> None:
    """Checks that the matrices are what PEFT computes with when the field `ensure_weight_tying` is set.

    Args:
        fields: adapter_config.json.
        modules: of the adapter.
        config: of the base model.
        name: of the adapter.

    Raises:
        AdapterError: the base ties embedding and head, and the adapter changes one of them only, or both differently.
    """
    embedding, head = (modules.get(ModuleId(OUTSIDE, leaf)) for leaf in (EMBEDDING, HEAD))
    tied = fields.get("ensure_weight_tying") and config.tie_word_embeddings
    if not tied or (embedding is None and head is None):
        return
    if embedding is None or head is None:
        problem = f"there is LoRA of {HEAD if embedding is None else EMBEDDING} only"
    elif not (np.array_equal(head.a, embedding.b.T) and np.array_equal(head.b, embedding.a.T)):
        problem = f"the matrices of {HEAD} are not the transposed ones of {EMBEDDING}"
    else:
        return
    raise AdapterError(
        f"adapter {name!r} needs what this server does not serve: ensure_weight_tying (field ensure_weight_tying=true, "
        f"and {problem}): load it in PEFT 0.21 and save it again, or set the field to false"
    )


def _changed_rows(copy: np.ndarray, base: np.ndarray) -> int:
    # Either may have been rounded from what the other still is.
    same = (copy == base.astype(copy.dtype)) | (copy.astype(base.dtype) == base)
    return int(np.count_nonzero(~same.all(axis=-1)))


def _full_weights(name: str, leaf: str, tensor: str, problem: str) -> AdapterError:
    feature = "full embedding weights" if leaf == EMBEDDING else "full head weights"
    return AdapterError(
        f"adapter {name!r} needs what this server does not serve: {feature} (tensor {tensor} {problem}): {_SEPARATE}"
    )
