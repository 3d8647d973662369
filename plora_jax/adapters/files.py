"""The files of an adapter: opened with an error that says what is wrong with them, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (gives numpy the bfloat16 that safetensors returns)
from safetensors import SafetensorError, safe_open

from plora_jax.adapters.adapter import AdapterError

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
_LFS_HEAD = b"version https://git-lfs"


def check_directory(path: Path, *, name: str) -> None:
    """Holds a path against what a PEFT adapter has.

    Raises:
        FileNotFoundError: no such directory, or none with weights in it.
        AdapterError: a file instead of a directory, weights without a configuration, or pickled weights only.
    """
    if path.is_file():
        raise AdapterError(f"adapter {name!r}: {path} is a file; give the directory that holds {CONFIG_FILE}")
    if not path.is_dir():
        raise FileNotFoundError(f"adapter {name!r}: the directory {path} does not exist")
    if not (path / TENSORS_FILE).is_file():
        if (path / PICKLE_FILE).is_file():
            raise AdapterError(
                f"adapter {name!r}: {path} has pickled weights only ({PICKLE_FILE}), which can run code when they are "
                "read; convert them where you trust them: safetensors.torch.save_file(torch.load(PICKLE, "
                f"weights_only=True), '{TENSORS_FILE}', metadata={{'format': 'pt'}})"
            )
        raise FileNotFoundError(f"adapter {name!r}: {path} has no {TENSORS_FILE}")
    if not (path / CONFIG_FILE).is_file():
        raise AdapterError(
            f"adapter {name!r}: {path} has no {CONFIG_FILE}; rank and scale are not known without it. "
            "Copy it from where the adapter was saved"
        )


def read_json_object(file: Path, *, name: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        AdapterError: not JSON, or not an object.
    """
    content = file.read_bytes()
    if content.startswith(_LFS_HEAD):
        raise _lfs_error(file, name)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, a number of thousands of digits
        raise AdapterError(f"adapter {name!r}: {file} ({len(content)} bytes) is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise AdapterError(f"adapter {name!r}: {file} holds a JSON {type(value).__name__}; it must hold an object")
    return value


def open_tensors(file: Path, *, name: str) -> Any:
    """A safetensors file, memory-mapped; a context manager as `safe_open` gives it.

    Raises:
        AdapterError: empty, truncated, a Git LFS pointer or no safetensors file.
    """
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        with file.open("rb") as opened:
            head = opened.read(len(_LFS_HEAD))
        if head == _LFS_HEAD:
            raise _lfs_error(file, name) from None
        if size == 0:
            raise AdapterError(f"adapter {name!r}: {file} is empty (0 bytes); download it again") from None
        raise AdapterError(
            f"adapter {name!r}: {file} ({size} bytes) is not a complete safetensors file: {error}; download it again"
        ) from None


@contextlib.contextmanager
def new_directory(path: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its place when the block ends without an error.

    Raises:
        FileExistsError: there is something at `path` and overwrite is false.
    """
    target = Path(path).absolute()
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already; choose another path or overwrite it")
    target.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh = holder / "new"
        fresh.mkdir()  # not mkdtemp, whose directories nobody else may read
        yield fresh
        _replace(target, fresh, holder / "old")
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def _replace(target: Path, fresh: Path, old: Path) -> None:
    if target.exists():
        target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes an object, its own keys sorted; those inside keep their order, which decides between patterns."""
    file.write_text(json.dumps(dict(sorted(value.items())), indent=2) + "\n", encoding="utf-8")


def _lfs_error(file: Path, name: str) -> AdapterError:
    return AdapterError(f"adapter {name!r}: {file} is a Git LFS pointer, not the file; run `git lfs pull` there")
