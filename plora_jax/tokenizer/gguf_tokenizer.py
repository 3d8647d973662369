"""A `tokenizers.Tokenizer` from the metadata of a GGUF file, equal to the model's own tokenizer.json.

GGUF names the vocabulary model ("gpt2" is byte-level BPE) and the pre-tokenizer that splits the text before it; the
table below holds those whose Hugging Face original is known. Any other name is refused: a near miss would give other
token ids without a word. Names: llama.cpp, convert_hf_to_gguf_update.py and llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class _PreTokenizer(NamedTuple):
    """What a pre-tokenizer name stands for: the split, and what else the originals that bear it have in common."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3 = _PreTokenizer(lambda: _split(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _PreTokenizer(_gpt2),
    "gpt-2": _PreTokenizer(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _PreTokenizer(lambda: _split(_QWEN2_SPLIT), nfc=True),
    "smollm": _PreTokenizer(_smollm),
}


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Builds the tokenizer that a GGUF file describes.

    Args:
        metadata: what `read_gguf_metadata` gives.

    Returns:
        The tokenizer and the entries of its tokenizer_config.json: special tokens, chat templates.

    Raises:
        ValueError: a vocabulary model or pre-tokenizer that is not known, or entries that are missing.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}; from GGUF this project reads 'gpt2' (byte-level BPE). "
            "Put the model's tokenizer.json and tokenizer_config.json beside the file."
        )
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}; this project knows {', '.join(PRE_TOKENIZERS)}. "
            "Put the model's tokenizer.json and tokenizer_config.json beside the file."
        )
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    rules = PRE_TOKENIZERS[pre]
    tokenizer = tokenizers.Tokenizer(_bpe(tokens, _required(metadata, "tokenizer.ggml.merges"), rules))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rules.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    plain = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return tokenizer, _config(metadata, tokens, rules)


def _bpe(tokens: list[str], merges: list[str], rules: _PreTokenizer) -> models.BPE:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens holds {len(tokens) - len(vocab)} tokens twice; the ids are not clear.")
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    return models.BPE(vocab=vocab, merges=pairs, fuse_unk=False, byte_fallback=False, ignore_merges=rules.ignore_merges)


def _config(metadata: Mapping[str, Any], tokens: list[str], rules: _PreTokenizer) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", rules.add_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if token_id >= len(tokens):
                raise ValueError(f"tokenizer.ggml.{key}_token_id is {token_id}, but there are {len(tokens)} tokens.")
            config[f"{name}_token"] = tokens[token_id]
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": text
        for key, text in metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(text, str)
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"the GGUF file has no {key}; it carries no complete tokenizer.")
    return metadata[key]
