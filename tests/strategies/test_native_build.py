"""What happens where the native kernels cannot be built."""

import concurrent.futures

import pytest

from strategies.native import build


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("PLORA_NATIVE_DIR", str(tmp_path))
    monkeypatch.delenv("PLORA_NATIVE", raising=False)


def unavailable():
    return build.unavailable.__wrapped__()


def test_unavailable_without_a_compiler_says_so(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert unavailable() == "no C++ compiler (g++ or clang++) was found"


def test_unavailable_switched_off_says_so(monkeypatch):
    monkeypatch.setenv("PLORA_NATIVE", "0")
    assert unavailable() == "switched off by PLORA_NATIVE=0"


def test_unavailable_compiler_that_fails_gives_its_first_line_and_leaves_no_file(monkeypatch, tmp_path):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'fatal: out of patience' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert unavailable() == f"{compiler} could not build the native kernels (exit status 3): fatal: out of patience"
    assert [p.name for p in tmp_path.iterdir()] == ["cxx"]


def test_starts_at_once_build_one_library(tmp_path):
    compiler, calls = tmp_path / "cxx", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho >> {calls}\nsleep 0.05\nfor last; do :; done\ntouch "$last"\n')
    compiler.chmod(0o755)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(build._library, [str(compiler)] * 4))
    assert len(paths) == 1
    assert calls.read_text().count("\n") == len(build._SOURCES) + 1, "each source once, and the link"
    assert {p.name for p in tmp_path.iterdir()} == {"cxx", "calls", *(path.name for path in paths)}


def test_function_without_a_library_says_why(monkeypatch):
    monkeypatch.setattr(build, "unavailable", lambda: "switched off by PLORA_NATIVE=0")
    with pytest.raises(RuntimeError, match="no native plora_plan_value: switched off by PLORA_NATIVE=0"):
        build.function("plora_plan_value")


def test_unavailable_folder_that_cannot_be_written_says_why(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLORA_NATIVE_DIR", str(tmp_path / "file" / "native"))
    monkeypatch.setenv("CXX", "/bin/sh")
    assert unavailable().startswith("the native kernels could not be built: ")
