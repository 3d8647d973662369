"""Which adapter names clients may use, and which directories they may have read."""

from __future__ import annotations

import os
import unicodedata

from plora_jax.wording import in_json, lone_surrogate, shortened

MAX_NAME_CHARS = 255
MAX_FILES = 1000
"""More files than an adapter has, in PEFT's form or in Orbax's: a directory of many adapters, say."""


class OutsideRootError(ValueError):
    """A path that may not be read: it leads out of the directory of adapters, or holds what no adapter holds."""


def name_problem(name: str, base_names: tuple[str, ...]) -> str | None:
    """Why an adapter may not be called this, None where it may.

    A name is shown in lists, logs and metrics and may become a file's name elsewhere.
    """
    if not name or not name.strip():
        return "an adapter's name must not be empty"
    if len(name) > MAX_NAME_CHARS:
        return f"an adapter's name may have at most {MAX_NAME_CHARS} characters, got {len(name)}"
    if name in (".", "..") or "/" in name or "\\" in name:
        return f"an adapter's name must not be a path, got {name!r}: leave out '/' and '\\', and '.' and '..' alone"
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
        return f"an adapter's name must not hold control characters, got {in_json(name)}"
    if "," in name:
        return f"an adapter's name must not hold a comma, got {name!r}: metrics list names with commas between"
    if name in base_names:
        return f"{name!r} is the base model's name: choose another"
    return None


def resolve_inside(root: str | None, path: str) -> str:
    """The real path of an adapter's directory, which lies inside the root with all that it holds.

    Links are followed before anything is compared, so that neither `..` nor a link leads out; no file is opened.

    Args:
        root: directory that adapters may be read from; None for none.
        path: as the client wrote it; a relative one starts at the root.

    Raises:
        OutsideRootError: the path, or a file in the directory, resolves outside the root. The message does not say
            whether anything is there.
        FileNotFoundError: there is no such directory inside the root.
    """
    if root is None:
        raise OutsideRootError("this server reads no adapters by path: start it with --adapter_root DIRECTORY")
    if "\0" in path:
        raise OutsideRootError("the path holds a NUL character")
    half = lone_surrogate(path)
    if half is not None:
        raise OutsideRootError(f"the path is not valid Unicode: lone surrogate {half}")
    real_root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(real_root, path))
    if not _is_inside(real_root, real):
        raise OutsideRootError(f"'{shortened(path)}' does not resolve inside --adapter_root")
    if not os.path.isdir(real):
        raise FileNotFoundError(f"no adapter directory at '{shortened(path)}'")
    _check_tree(real_root, real, path=path)
    return real


def _check_tree(real_root: str, start: str, *, path: str) -> None:
    """Raises OutsideRootError where anything below a directory, behind links as well, lies outside the root."""
    pending, seen, entries = [start], set(), 0
    while pending:
        directory = pending.pop()
        if directory in seen:
            continue
        seen.add(directory)
        for entry in os.scandir(directory):
            entries += 1
            target = os.path.realpath(entry.path)
            if not _is_inside(real_root, target):
                raise OutsideRootError(
                    f"{entry.name!r} in '{shortened(path)}' is a link that leads out of --adapter_root"
                )
            if entries > MAX_FILES:
                raise OutsideRootError(f"'{shortened(path)}' holds more than {MAX_FILES} files, so it is no adapter")
            if os.path.isdir(target):
                pending.append(target)


def _is_inside(real_root: str, real: str) -> bool:
    return real == real_root or real.startswith(real_root.rstrip(os.sep) + os.sep)
