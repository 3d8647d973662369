"""python -m launch.bench quality: figures of a small model, the report, and what is refused."""

import dataclasses
import json

import pytest
from rich.console import Console

from launch.benchmarks.quality import TEXT, QualityCase, as_json, as_text, measure_quality, parse_precisions
from launch.console import StageLog
from launch.flags import StartError
from tests.launch.small_engine import LLAMA, PACK

CASE = QualityCase(model=str(LLAMA), precisions="bfloat16, float32+int8, float32+int8kv", windows=3, window_tokens=32)


def quiet() -> StageLog:
    return StageLog(Console(quiet=True))


def test_quality_compares_precisions_with_float32_on_the_same_tokens():
    found = measure_quality(CASE, log=quiet())
    exact, rounded, small, small_kv = found
    assert [q.precision for q in found] == ["float32", "bfloat16", "float32+int8", "float32+int8kv"]
    assert (exact.loss, exact.error) == (0, 0)
    for quality in (rounded, small):
        assert quality.perplexity == pytest.approx(exact.perplexity * (1 + quality.loss))
        assert 0 < abs(quality.loss) < 0.05
        assert 0 < quality.error < 0.05
        assert quality.weight_bytes < 0.7 * exact.weight_bytes
    assert 0 < abs(small_kv.loss) < 0.01
    assert small_kv.weight_bytes == exact.weight_bytes
    got = json.loads(json.dumps(as_json(CASE, found, command="python -m launch.bench quality")))
    assert got["precisions"][2]["perplexity"] == small.perplexity
    lines = as_text(CASE, found, command="python -m launch.bench quality").splitlines()
    assert lines[1] == "text             alice.txt, 3 windows of 32 tokens at most"
    assert lines[4].split()[:3] == ["float32", f"{exact.perplexity:.3f}", "0.00"]
    assert lines[-1] == "command          python -m launch.bench quality"


def test_quality_with_an_adapter_changes_with_its_precision():
    case = dataclasses.replace(CASE, precisions="float32+int8lora", adapter=str(PACK / "adapters" / "rank48"))
    alone, (exact, small) = measure_quality(CASE, log=quiet())[0], measure_quality(case, log=quiet())
    assert abs(exact.perplexity / alone.perplexity - 1) > 0.01, "the adapter must count"
    assert 0 < abs(small.loss) < 0.01
    assert small.precision == "float32+int8lora"
    lines = as_text(case, [exact, small], command="x").splitlines()
    assert lines[1] == f"adapter          {case.adapter}"


def test_parse_precisions_puts_float32_first_and_takes_each_once():
    found = parse_precisions("bfloat16,float32,bfloat16+int8,bfloat16,float32+int8+int8kv")
    assert found == [
        ("float32", "none", False, False),
        ("bfloat16", "none", False, False),
        ("bfloat16", "int8", False, False),
        ("float32", "int8", True, False),
    ]
    assert [precision.name for precision in found[2:]] == ["bfloat16+int8", "float32+int8+int8kv"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"precisions": "int4"},
            "--precisions 'int4' is no precision: take float32 or bfloat16, then what you want of +int8 or +gguf, of "
            "+int8lora, of +int8kv",
        ),
        ({"precisions": "bfloat16+int4"}, "--precisions 'bfloat16+int4' is no precision: take float32"),
        ({"precisions": "bfloat16+int8kv+int8"}, "--precisions 'bfloat16+int8kv+int8' is no precision: take float32"),
        (
            {"precisions": "bfloat16+int8lora"},
            "--precisions 'bfloat16+int8lora' rounds an adapter, and there is none: name one by --adapter",
        ),
        (
            {"adapter": str(PACK / "adapters" / "embed_head_lora")},
            "embed_head_lora' changes embed_tokens: only adapters of the layers can be measured",
        ),
        ({"adapter": "/nowhere"}, "/nowhere"),
        ({"windows": 0}, "--windows 0 and --window_tokens 32 leave nothing to predict: at least 1 and 2 are needed"),
        ({"window_tokens": 10**6}, "tokens, fewer than --window_tokens 1000000: lower it"),
        ({"text": "/nowhere"}, "--text '/nowhere' cannot be read: "),
        ({"output_json": "/nowhere/x.json"}, "--output_json '/nowhere/x.json' is in a directory that does not exist"),
        ({"model": str(PACK / "models" / "mixtral")}, "--quantization int8 does not cover routed experts"),
    ],
)
def test_quality_that_cannot_be_measured_is_refused(options, says):
    with pytest.raises(StartError) as caught:
        measure_quality(dataclasses.replace(CASE, **options), log=quiet())
    assert says in str(caught.value)


def test_text_of_the_project_is_the_book_and_plain_ascii():
    text = TEXT.read_text(encoding="utf-8")
    assert text.isascii()
    assert "Alice was beginning to get very tired" in text[:400]
    assert 40_000 < len(text) < 100_000
