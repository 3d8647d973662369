"""An adapter from a directory of either form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plora_jax.adapters.adapter import Adapter
from plora_jax.adapters.files import CONFIG_FILE, check_directory
from plora_jax.adapters.orbax import is_adapter_checkpoint, restore_adapter
from plora_jax.adapters.outer import BaseWeights
from plora_jax.adapters.peft import load_peft_adapter
from plora_jax.config import ModelConfig


def load_adapter(
    path: str | Path,
    *,
    name: str,
    config: ModelConfig,
    max_lora_rank: int | None = None,
    dtype: Any = None,
    base_weights: BaseWeights | None = None,
) -> Adapter:
    """An adapter from a PEFT directory or from an Orbax checkpoint; PEFT's where a directory is both.

    Args:
        path: the directory.
        name: what clients will call it.
        config: of the base model.
        max_lora_rank: largest rank of any module; None for no limit.
        dtype: numpy or ml_dtypes dtype that the matrices are cast to; None keeps what is stored.
        base_weights: gives the parameters of the base model, to compare copies of its embedding and head with, which
            PEFT saves beside LoRA of them; None takes them for what they should be.

    Returns:
        The adapter, in host memory: its files are not needed any more.

    Raises:
        FileNotFoundError: no directory, or no weights in it.
        AdapterError: files that cannot be read, or an adapter that cannot be served exactly on this base model.
    """
    directory = Path(path)
    if _is_checkpoint_only(directory):
        return restore_adapter(directory, name=name, config=config, max_lora_rank=max_lora_rank, dtype=dtype)
    return load_peft_adapter(
        directory, name=name, config=config, max_lora_rank=max_lora_rank, dtype=dtype, base_weights=base_weights
    )


def check_adapter_files(path: str | Path, *, name: str) -> None:
    """Looks whether `load_adapter` would find the files of an adapter; opens none.

    Raises:
        FileNotFoundError, AdapterError: as `load_adapter`, where they are not there.
    """
    directory = Path(path)
    if not _is_checkpoint_only(directory):
        check_directory(directory, name=name)


def _is_checkpoint_only(directory: Path) -> bool:
    return is_adapter_checkpoint(directory) and not (directory / CONFIG_FILE).exists()
