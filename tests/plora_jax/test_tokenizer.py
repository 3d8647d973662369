"""Loading tokenizers from every form of a model, and what they then do."""

from __future__ import annotations

import json
import pathlib
import shutil
import time

import gguf
import pytest
from tokenizers import pre_tokenizers

from plora_jax.gguf_file import read_gguf_metadata
from plora_jax.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from plora_jax.tokenizer.gguf_tokenizer import PRE_TOKENIZERS
from tests.plora_jax.tokenizers_for_tests import (
    PACK_MODEL,
    default_model_file,
    default_tokenizer,
    pack_tokenizer,
    sentencepiece_tokenizer,
)

GOLDEN_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # DESIGN.md


def write_gguf(file: pathlib.Path, *, pre: str | None = "gpt-2", model: str = "gpt2", **metadata: bool | int) -> None:
    """A GGUF file that holds a tokenizer of the 256 bytes, one merge, a control and a user-defined token."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, "ab", "<s>", "<tool>"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 4])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def copy_pack(directory: pathlib.Path, **config) -> pathlib.Path:
    shutil.copy(PACK_MODEL / "tokenizer.json", directory)
    named = json.loads((PACK_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    (directory / "tokenizer_config.json").write_text(json.dumps(named | config), encoding="utf-8")
    return directory


def test_load_tokenizer_default_model_gives_the_goldens_fast() -> None:
    begin = time.process_time()
    tokenizer = load_tokenizer(default_model_file())
    assert time.process_time() - begin < 1.5
    assert tokenizer.decode(GOLDEN_ANSWER) == "The capital of France is Paris."
    assert tokenizer.decode(GOLDEN_ANSWER, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.encode("The capital of France is Paris.<|im_end|>") == GOLDEN_ANSWER
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.chat_template is not None


def test_load_tokenizer_directory_with_gguf_equals_the_file() -> None:
    assert load_tokenizer(default_model_file().parent).encode("It's 1234 é") == default_tokenizer().encode(
        "It's 1234 é"
    )


def test_tokenizer_smollm_splits_digits_one_by_one() -> None:
    tokenizer = default_tokenizer()
    assert [tokenizer.token_text(i) for i in tokenizer.encode("in 1234")] == ["in", " ", "1", "2", "3", "4"]


@pytest.mark.parametrize("text", ["", " a", "a  b\n\n\tc", "don't 12 é 你好 👩‍🚀", "naïve\u0301\u200d"])
def test_tokenizer_byte_level_text_comes_back_as_it_was(text: str) -> None:
    assert default_tokenizer().decode(default_tokenizer().encode(text)) == text


def test_tokenizer_pack_ids_are_characters_from_4e00() -> None:
    tokenizer = pack_tokenizer()
    assert tokenizer.encode(chr(0x4E00 + 5) + chr(0x4E00 + 200)) == [5, 200]
    assert tokenizer.decode([5, 200, 2]) == chr(0x4E00 + 5) + chr(0x4E00 + 200)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 256)
    assert tokenizer.special_ids == frozenset({0, 1, 2})  # pad, bos and eos of tokenizer_config.json


def test_tokenizer_token_bytes_are_the_bytes_inside_a_text() -> None:
    byte_level, fallback = default_tokenizer(), sentencepiece_tokenizer()
    for text in ("Hello wörld 😀", " \n", "<|im_end|>"):
        assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()
    ids = fallback.encode("ab 😀", add_special_tokens=False)
    assert b"".join(map(fallback.token_bytes, ids)) == " ab 😀".encode()
    assert pack_tokenizer().token_bytes(5) == chr(0x4E05).encode()
    assert byte_level.token_text(3575) == " capital"
    assert byte_level.token_bytes(10**6) == b""


@pytest.mark.parametrize("make", [default_tokenizer, pack_tokenizer, sentencepiece_tokenizer])
def test_tokenizer_saved_loads_back_equal(make, tmp_path: pathlib.Path) -> None:
    first: Tokenizer = make()
    first.save(tmp_path)
    second = load_tokenizer(tmp_path)
    assert second._backend.to_str() == first._backend.to_str()
    for name in ("special_tokens", "special_ids", "bos_token_id", "eos_token_id", "vocab_size", "chat_templates"):
        assert getattr(second, name) == getattr(first, name)
    assert second.encode("ab 丅 <|im_end|>") == first.encode("ab 丅 <|im_end|>")


@pytest.mark.parametrize("inside", [True, False])
def test_load_tokenizer_orbax_checkpoint_finds_it_inside_or_beside(inside: bool, tmp_path: pathlib.Path) -> None:
    checkpoint = tmp_path / "params"
    checkpoint.mkdir()
    (checkpoint / "_METADATA").write_text("{}")
    pack_tokenizer().save(checkpoint if inside else tmp_path)
    assert load_tokenizer(checkpoint).encode("丅") == [5]


def test_load_tokenizer_config_that_asks_for_bos_and_eos_gets_them(tmp_path: pathlib.Path) -> None:
    tokenizer = load_tokenizer(copy_pack(tmp_path, add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("丅") == [1, 5, 2]
    assert tokenizer.encode("丅", add_special_tokens=False) == [5]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("丅") == [1, 5, 2]


def test_load_tokenizer_added_tokens_of_the_config_get_their_ids(tmp_path: pathlib.Path) -> None:
    entry = {"content": "<x>", "special": True, "normalized": False}
    tokenizer = load_tokenizer(copy_pack(tmp_path, added_tokens_decoder={"256": entry}))
    assert tokenizer.encode("丅<x>") == [5, 256]
    assert 256 in tokenizer.special_ids


def test_load_tokenizer_special_tokens_map_fills_in_missing_names(tmp_path: pathlib.Path) -> None:
    shutil.copy(PACK_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "丂"}}), encoding="utf-8")
    assert load_tokenizer(tmp_path).eos_token_id == 2


def test_load_tokenizer_chat_templates_come_from_every_place(tmp_path: pathlib.Path) -> None:
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
    copy_pack(tmp_path, chat_template=listed)
    assert load_tokenizer(tmp_path).chat_templates == {"default": "A", "tool_use": "T"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "B"}))
    assert load_tokenizer(tmp_path).chat_template == "B"
    (tmp_path / "chat_template.jinja").write_text("C")
    assert load_tokenizer(tmp_path).chat_template == "C"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"eos_token": "</s>"}, "names eos_token '</s>', which is not in the vocabulary"),
        ({"bos_token": None, "add_bos_token": True}, "sets add_bos_token, but names no bos_token"),
        (
            {"added_tokens_decoder": {"999": {"content": "<x>"}}},
            "gives '<x>' the id 999, but tokenizer.json makes it 256",
        ),
        ({"chat_template": [{"name": "x"}]}, "chat_template must be a string or a list of objects"),
    ],
)
def test_load_tokenizer_contradicting_config_is_refused(config, text: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(TokenizerError, match=text.replace("[", r"\[")):
        load_tokenizer(copy_pack(tmp_path, **config))


def test_load_tokenizer_without_files_says_what_is_needed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TokenizerError, match="there is no such file or directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(TokenizerError, match=r"need tokenizer\.json .* or a \.gguf file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"only tokenizer\.model .*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's 1234!\n\nX", ["It", "'s", "Ġ1234", "!", "Ċ", "Ċ", "X"]),
        ("smollm", "It's 123!", ["It", "'s", "Ġ", "1", "2", "3", "!"]),
        ("llama-bpe", "It'S 12345!\n\nX", ["It", "'S", "Ġ", "123", "45", "!ĊĊ", "X"]),
        ("qwen2", "It'S 123!\n\nX", ["It", "'S", "Ġ", "1", "2", "3", "!ĊĊ", "X"]),
    ],
)
def test_gguf_pre_tokenizer_splits_as_its_original(pre: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_gguf_tokenizer_every_known_pre_tokenizer_loads(pre: str, tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "m.gguf", pre=pre)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    bos = [257] if pre.startswith("llama") else []
    assert tokenizer.encode("ab<tool><s>") == [*bos, 256, 258, 257]
    assert tokenizer.decode([256, 258, 257]) == "ab<tool>"  # user-defined tokens are text, control tokens are not
    assert tokenizer.special_ids == frozenset({257})


def test_gguf_tokenizer_add_bos_entry_wins_over_the_default(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "m.gguf", pre="llama-bpe", add_bos_token=False)
    assert load_tokenizer(tmp_path).encode("ab") == [256]


def test_gguf_tokenizer_json_beside_the_file_is_preferred(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    copy_pack(tmp_path)
    assert load_tokenizer(tmp_path / "m.gguf").encode("丅") == [5]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; this project knows default, gpt-2, llama-bpe"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'.*Put the model's tokenizer.json"),
        ({"eos_token_id": 900}, "tokenizer.ggml.eos_token_id is 900, but there are 259 tokens"),
    ],
)
def test_gguf_tokenizer_that_is_not_known_is_refused_by_name(options, text: str, tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(TokenizerError, match=text):
        load_tokenizer(tmp_path / "m.gguf")


def test_read_gguf_metadata_equals_the_gguf_package(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, add_bos_token=True)
    fields = gguf.GGUFReader(str(file)).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert read_gguf_metadata(file) == expected


def test_read_gguf_metadata_damaged_file_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:700])
    with pytest.raises(ValueError, match="damaged GGUF file"):
        read_gguf_metadata(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="does not start with 'GGUF'"):
        read_gguf_metadata(file)
