"""The tokenizer of a base model: the Hugging Face `tokenizers` engine plus what tokenizer_config.json adds to it.

Loading gives the token ids and texts that transformers gives, without importing it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from plora_jax.gguf_file import read_gguf_metadata
from plora_jax.tokenizer.gguf_tokenizer import build_gguf_tokenizer
from plora_jax.tokenizer.hf_files import TokenizerError, read_tokenizer_config
from plora_jax.tokenizer.token_bytes import byte_mapper

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: number of tokens, added ones included; the model's embedding may have more rows.
        bos_token_id: or None.
        eos_token_id: or None.
        special_ids: tokens that `skip_special_tokens` leaves out of a text.
        special_tokens: the text of bos_token, eos_token, unk_token and pad_token, where the model has them.
        chat_templates: Jinja text by name.
        chat_template: the one named "default", or None.

    Args:
        backend: the engine; its truncation and padding are switched off, special tokens of `config` are added to it.
        config: entries of a tokenizer_config.json.

    Raises:
        TokenizerError: `config` contradicts the vocabulary.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        self._backend = backend
        self._config = dict(config)
        self.chat_templates = _chat_templates(self._config.pop("chat_template", None))
        self.special_tokens = {n: text for n in _NAMED_TOKENS if (text := _token_text(self._config.get(n))) is not None}
        backend.no_truncation()
        backend.no_padding()
        self._add_declared_tokens()
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._complete_post_processor()
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._to_bytes = byte_mapper(backend.decoder)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text are read as such.

        Args:
            text: any text.
            add_special_tokens: add what the model puts around a text, such as BOS.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD and unknown ids nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it ("Ġthe", "▁the", "<0x0A>"), None for an unknown id."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for inside a text; empty for an unknown id."""
        token = self.id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD where a token ends or starts inside a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which load back as an equal tokenizer, here or elsewhere."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = dict(self._config)
        if set(self.chat_templates) == {"default"}:
            config["chat_template"] = self.chat_template
        elif self.chat_templates:
            config["chat_template"] = [{"name": n, "template": t} for n, t in self.chat_templates.items()]
        self._backend.save(str(directory / "tokenizer.json"))
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _add_declared_tokens(self) -> None:
        """Adds the tokens that tokenizer_config.json declares and tokenizer.json does not, as transformers does."""
        added = self._backend.get_added_tokens_decoder()
        declared = {int(i): entry for i, entry in self._config.get("added_tokens_decoder", {}).items()}
        for token_id, entry in sorted(declared.items()):
            if token_id not in added:
                self._backend.add_tokens([_added_token(entry)])
                got = self._backend.token_to_id(entry["content"])
                if got != token_id:
                    raise TokenizerError(
                        f"added_tokens_decoder gives {entry['content']!r} the id {token_id}, but tokenizer.json makes "
                        f"it {got}: the two files do not belong together."
                    )
        extra = [self._config.get(n) for n in (*_NAMED_TOKENS, "cls_token", "sep_token", "mask_token")]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = self._config.get(key) or []
            extra += listed.values() if isinstance(listed, Mapping) else listed
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        texts = dict.fromkeys(t for t in map(_token_text, extra) if t is not None and t not in known)
        # A token without an id of the model could never be used: it must not get one past the end of the vocabulary.
        usable = [t for t in texts if self._backend.token_to_id(t) is not None]
        self._backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in usable])

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        if text is None:
            return None
        token_id = self._backend.token_to_id(text)
        if token_id is None:
            raise TokenizerError(f"tokenizer_config.json names {name} {text!r}, which is not in the vocabulary.")
        return token_id

    def _complete_post_processor(self) -> None:
        """Makes `encode` add BOS and EOS where tokenizer_config.json asks for them and tokenizer.json does not."""
        around = self._backend.encode("", add_special_tokens=True).ids
        pieces = ["$A:0"]
        for flag, name, place in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", 1)):
            if not self._config.get(flag):
                continue
            token_id = self._named_id(name)
            if token_id is None:
                raise TokenizerError(f"tokenizer_config.json sets {flag}, but names no {name}.")
            if token_id not in around:
                pieces.insert(place * len(pieces), f"{self.special_tokens[name]}:0")
        if len(pieces) == 1:
            return
        names = [piece.removesuffix(":0") for piece in pieces if piece != "$A:0"]
        ids = [(name, self._backend.token_to_id(name)) for name in names]
        template = processors.TemplateProcessing(single=pieces, pair=[*pieces, "$B:1"], special_tokens=ids)
        before = self._backend.post_processor
        self._backend.post_processor = processors.Sequence([before, template]) if before else template


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
        path: a Hugging Face directory, a .gguf file or a directory that holds one, or an Orbax checkpoint of this
            project (tokenizer.json lies in it or beside it). A tokenizer.json beside a .gguf file is preferred to the
            metadata of the file.

    Raises:
        TokenizerError: there is no tokenizer, or it cannot be read exactly; the message says what to do.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise TokenizerError(f"no tokenizer at {path}: there is no such file or directory.")
    directory = path if path.is_dir() else path.parent
    places = [directory, directory.parent] if _is_orbax(directory) else [directory]
    for place in places:
        if (place / "tokenizer.json").is_file():
            return _load_hf(place)
    ggufs = [path] if path.suffix == ".gguf" else sorted(directory.glob("*.gguf"))
    if ggufs:
        return _load_gguf(ggufs[0])
    if (directory / "tokenizer.model").is_file():
        raise TokenizerError(
            f"{directory} has only tokenizer.model (sentencepiece); this project reads tokenizer.json. Make one with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    raise TokenizerError(
        f"no tokenizer at {path}: need tokenizer.json (Hugging Face or Orbax directory) or a .gguf file."
    )


def _is_orbax(directory: pathlib.Path) -> bool:
    return any((directory / name).exists() for name in ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"))


def _load_hf(directory: pathlib.Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the engine raises bare Exception
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    return Tokenizer(backend, read_tokenizer_config(directory))


def _load_gguf(file: pathlib.Path) -> Tokenizer:
    try:
        return Tokenizer(*build_gguf_tokenizer(read_gguf_metadata(file)))
    except TokenizerError:
        raise
    except ValueError as error:
        raise TokenizerError(f"{file}: {error}") from error


def _token_text(token: Any) -> str | None:
    """The text of a token that a configuration writes as a string or as an object with a content."""
    return token.get("content") if isinstance(token, Mapping) else token


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})


def _chat_templates(entry: Any) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    return {item["name"]: item["template"] for item in entry}
