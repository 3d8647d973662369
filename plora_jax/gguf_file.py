"""A GGUF file's metadata and its list of tensors, read in one pass.

`gguf.GGUFReader` makes a numpy view of every string of the vocabulary and merges, which takes over two seconds for
49,152 tokens; reading the same bytes with `struct` takes a tenth of that. Layout: ggml's docs/gguf.md. The gguf package
still knows the tensor types and dequantises them.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import struct
from typing import Any, NamedTuple

import gguf
import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_VIEWS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


class GgufTensor(NamedTuple):
    """One tensor as it is stored.

    Attributes:
        name: llama.cpp's name.
        shape: logical shape, slowest axis first.
        kind: how its values are stored.
        data: memory-mapped values or, where quantised, bytes; the last axis is the fastest.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: np.ndarray


class GgufFile(NamedTuple):
    """Attributes: metadata: Python values by key; tensors: by name, in the order of the file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_metadata(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads every key of a little-endian GGUF file, versions 2 and 3; no tensor is touched.

    Returns:
        Numbers, booleans and strings as they are, arrays as lists.

    Raises:
        ValueError: the file is not GGUF, of another version, or cut short.
    """
    return _read(pathlib.Path(path), with_tensors=False).metadata


def read_gguf_file(path: str | pathlib.Path) -> GgufFile:
    """Reads the metadata and maps the tensors; their values are read when they are used.

    Raises:
        ValueError: the file is not GGUF, of another version, cut short, or has a tensor type that the gguf package
            does not know.
    """
    return _read(pathlib.Path(path), with_tensors=True)


def _read(path: pathlib.Path, *, with_tensors: bool) -> GgufFile:
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not start with 'GGUF'.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, 4)
            try:
                metadata, count = cursor.header(path)
                entries = [cursor.tensor() for _ in range(count if with_tensors else 0)]
            except (struct.error, IndexError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is a damaged GGUF file: its metadata cannot be read ({error}).") from error
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-cursor.offset // alignment) * alignment
    return GgufFile(metadata, {e.name: _map(path, start, e) for e in entries})


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _map(path: pathlib.Path, start: int, entry: _Entry) -> GgufTensor:
    try:
        kind = gguf.GGMLQuantizationType(entry.kind)
    except ValueError:
        raise ValueError(f"{path}: tensor {entry.name} has type {entry.kind}, which the gguf package lacks.") from None
    begin = start + entry.offset
    if kind.name in _VIEWS:
        dtype, shape = np.dtype(_VIEWS[kind.name]), entry.shape
    else:
        dtype, shape = np.dtype(np.uint8), gguf.quants.quant_shape_to_byte_shape(entry.shape, kind)
    end, size = begin + math.prod(shape) * dtype.itemsize, path.stat().st_size
    if end > size:
        raise ValueError(f"{path} is cut short: tensor {entry.name} ends at byte {end} of {size}.")
    data = np.memmap(path, dtype=dtype, mode="r", offset=begin, shape=shape)
    return GgufTensor(entry.name, entry.shape, kind, data)


class _Cursor:
    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def header(self, path: pathlib.Path) -> tuple[dict[str, Any], int]:
        """The metadata and the number of tensors."""
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"{path} is GGUF version {version} (or big-endian); this reader knows 2 and 3.")
        tensors = self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(self._scalar("Q"))}, tensors

    def tensor(self) -> _Entry:
        """The next entry of the list of tensors; the file names the fastest axis first."""
        name = self._string()
        shape = self._take(f"<{self._scalar('I')}Q")[::-1]
        return _Entry(name, shape, self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise IndexError(f"value type {kind} at byte {self.offset}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            return list(self._take(f"<{count}{_SCALARS[item]}"))
        return [self._value(item) for _ in range(count)]

    def _scalar(self, code: str) -> Any:
        return self._take("<" + code)[0]

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self.offset)
        self.offset += struct.calcsize(form)
        return values

    def _string(self) -> str:
        begin = self.offset + 8
        end = begin + self._scalar("Q")
        if end > len(self._data):
            raise IndexError(f"string at byte {begin} ends past the file")
        self.offset = end
        return self._data[begin:end].decode("utf-8")
