"""absl flags from frozen dataclasses: one flag a field, its default and its help read from the class.

    flags.define(EngineConfig)                 # before the command line is parsed
    config = flags.read(EngineConfig)          # after
    flags.run(main)                            # parses, calls main, turns StartError into one line and exit code 2

Flags are known only here and in the programs of this folder; everything below gets the dataclasses.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from absl import app
from absl import flags as absl_flags

_T = TypeVar("_T")


class StartError(Exception):
    """The program cannot start as asked; the message says in one line what to change."""


def define(
    config_class: type,
    *,
    leave_out: Collection[str] = (),
    only: Collection[str] | None = None,
    flag_values: absl_flags.FlagValues = absl_flags.FLAGS,
) -> None:
    """Defines one flag for each field of a dataclass.

    The field's type decides the flag's: bool, int, float, str, each with or without None; a tuple of str makes the
    flag repeatable. The help is the field's entry under `Attributes:` in the class's docstring, with "unset" for None,
    which no command line can write.

    Args:
        config_class: a dataclass.
        leave_out: fields that get no flag.
        only: where given, the only fields that get one.
        flag_values: where the flags go.
    """
    texts, types_ = _attribute_texts(config_class), typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if field.name in leave_out or (only is not None and field.name not in only):
            continue
        _define_one(field.name, types_[field.name], _default(field), help_text=texts[field.name], into=flag_values)


def read(config_class: type[_T], *, flag_values: absl_flags.FlagValues = absl_flags.FLAGS, **overrides: Any) -> _T:
    """The dataclass that the command line describes; fields without a flag keep their defaults.

    Args:
        config_class: as for `define`.
        flag_values: parsed flags.
        **overrides: values of fields that stand over the flags.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):  # pyright: ignore[reportArgumentType]
        if field.name in flag_values:
            value = flag_values[field.name].value
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return config_class(**(values | overrides))


def run(main: Callable[[], int | None]) -> None:
    """Parses the command line and runs a program.

    A flag or a value that cannot be, and a StartError, end it with one line on stderr and exit code 2; Ctrl-C with 130.
    """

    def guarded(argv: list[str]) -> int:
        if argv[1:]:
            _stop(f"unexpected argument {argv[1]!r}: {_hint(argv[1], sys.argv)}")
        try:
            return main() or 0
        except StartError as error:
            _stop(str(error))
        except KeyboardInterrupt:
            return 130

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    flag_values = absl_flags.FLAGS
    # --help shows the flags of the program; those that this module defined for it count as such.
    for flag in flag_values.get_flags_for_module(__name__):
        flag_values.register_key_flag_for_module(sys.argv[0], flag)
    try:
        left = flag_values(argv)
    except absl_flags.CantOpenFlagFileError as error:
        cause = error.__context__
        _stop(
            f"--flagfile {cause.filename!r} cannot be read: {cause.strerror}"
            if isinstance(cause, OSError)
            else str(error)
        )
    except UnicodeDecodeError as error:
        _stop(f"--flagfile is not a text file: {error}")
    except absl_flags.Error as error:
        _stop(str(error))
    if flag_values["verbosity"].using_default_value:
        # Warnings: absl's own default also shows what JAX tells its developers.
        flag_values.verbosity = -1
    return left


def _hint(stray: str, arguments: Sequence[str]) -> str:
    """What to write instead of an argument that is no flag; one after a repeatable flag was meant as its value."""
    for argument in reversed(arguments[: arguments.index(stray)]):
        if argument.startswith("--"):
            name = argument.removeprefix("--").partition("=")[0]
            if name in absl_flags.FLAGS and isinstance(absl_flags.FLAGS[name], absl_flags.MultiFlag):
                return f"repeat the flag for each value, --{name}={stray}"
            break
    return "all options are flags, see --help"


def _stop(message: str) -> typing.NoReturn:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _define_one(name: str, hint: Any, default: Any, *, help_text: str, into: absl_flags.FlagValues) -> None:
    kinds: dict[Any, Callable[..., Any]] = {
        bool: absl_flags.DEFINE_bool,
        int: absl_flags.DEFINE_integer,
        float: absl_flags.DEFINE_float,
        str: absl_flags.DEFINE_string,
    }
    hint = _without_none(hint)
    if typing.get_origin(hint) is tuple:
        make, default = absl_flags.DEFINE_multi_string, list(default)
    elif hint in kinds:
        make = kinds[hint]
    else:
        raise TypeError(f"field {name} has type {hint}, for which there is no flag")
    make(name, default, help_text, flag_values=into)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        left = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return left[0] if len(left) == 1 else hint
    return hint


def _attribute_texts(config_class: type) -> dict[str, str]:
    """Texts under `Attributes:` of a Google-style docstring, by field."""
    doc = inspect.getdoc(config_class) or ""
    section = re.search(r"^Attributes:\n((?:[ ]{4}.*\n?|\n)*)", doc, re.MULTILINE)
    texts: dict[str, str] = {}
    if section is None:
        return texts
    for entry in re.finditer(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1], re.MULTILINE):
        text = re.sub(r"\bNone\b", "unset", " ".join(entry[2].split()))
        texts[entry[1]] = text[:1].upper() + text[1:]
    return texts
