import json

import pytest

from plora_jax.adapters import AdapterError, load_adapter
from tests.plora_jax.adapters_for_tests import MODEL, write_peft

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def load(path):
    return load_adapter(path, name="x", config=MODEL)


def test_load_adapter_from_no_directory_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter 'x': the directory .*/nowhere does not exist"):
        load(tmp_path / "nowhere")


def test_load_adapter_from_an_empty_directory_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter 'x': .* has no adapter_model\.safetensors"):
        load(tmp_path)


def test_load_adapter_without_weights_is_file_not_found(tmp_path):
    (write_peft(tmp_path / "a") / TENSORS).unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model\.safetensors"):
        load(tmp_path / "a")


def test_load_adapter_from_a_file_asks_for_its_directory(tmp_path):
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is a file; give the directory"):
        load(write_peft(tmp_path / "a") / TENSORS)


def test_load_adapter_without_config_is_refused(tmp_path):
    (write_peft(tmp_path / "a") / CONFIG).unlink()
    with pytest.raises(AdapterError, match=r"adapter 'x': .*/a has no adapter_config\.json; rank and scale"):
        load(tmp_path / "a")


def test_load_adapter_with_pickled_weights_only_is_refused_with_advice_and_not_read(tmp_path):
    path = write_peft(tmp_path / "a")
    (path / TENSORS).unlink()
    (path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(AdapterError, match=r"pickled weights only \(adapter_model\.bin\).*can run code.*convert them"):
        load(path)


def test_load_adapter_prefers_safetensors_to_pickle(tmp_path):
    path = write_peft(tmp_path / "a")
    (path / "adapter_model.bin").write_bytes(b"garbage")
    assert len(load(path).modules) == 6


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_load_adapter_from_truncated_weights_is_refused(keep, tmp_path):
    file = write_peft(tmp_path / "a") / TENSORS
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(AdapterError, match=r"\(\d+ bytes\) is not a complete safetensors file: .*download it again"):
        load(tmp_path / "a")


def test_load_adapter_from_empty_weights_is_refused(tmp_path):
    (write_peft(tmp_path / "a") / TENSORS).write_bytes(b"")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is empty \(0 bytes\); download it again"):
        load(tmp_path / "a")


@pytest.mark.parametrize("file", [CONFIG, TENSORS])
def test_load_adapter_from_a_git_lfs_pointer_is_refused(file, tmp_path):
    (write_peft(tmp_path / "a") / file).write_bytes(POINTER)
    with pytest.raises(AdapterError, match=rf"{file} is a Git LFS pointer, not the file; run `git lfs pull` there"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"\(0 bytes\) is not JSON"),
        (b'{"r": 4', r"\(7 bytes\) is not JSON"),
        (b"\xff\xfe{", r"is not JSON"),
        (b"[" * 100_000, r"is not JSON"),
        (b"[1, 2]", r"holds a JSON list; it must hold an object"),
        (b"null", r"holds a JSON NoneType; it must hold an object"),
        (b"{}", r"is not PEFT's, it has no peft_type"),
    ],
)
def test_load_adapter_from_a_broken_config_is_refused(content, text, tmp_path):
    (write_peft(tmp_path / "a") / CONFIG).write_bytes(content)
    with pytest.raises(AdapterError, match=f"adapter 'x': .*adapter_config.json .*{text}"):
        load(tmp_path / "a")


def test_load_adapter_config_in_utf_16_is_read(tmp_path):
    file = write_peft(tmp_path / "a") / CONFIG
    file.write_bytes(json.dumps(json.loads(file.read_text())).encode("utf-16"))
    assert len(load(tmp_path / "a").modules) == 6
