import math
import re
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from plora_jax.adapters import AdapterError, LoraRules, module_rule, read_rules

Q0, Q1, V11 = (f"model.layers.{i}.self_attn.{p}" for i, p in ((0, "q_proj"), (1, "q_proj"), (11, "v_proj")))


def test_module_rule_without_patterns_divides_alpha_by_rank():
    assert module_rule(LoraRules(rank=16, alpha=24), Q0) == (16, 1.5, "r=16")


def test_module_rule_with_rslora_divides_alpha_by_root_of_rank():
    assert module_rule(LoraRules(rank=16, alpha=24, rslora=True), Q0)[:2] == (16, 6.0)


def test_module_rule_first_matching_key_in_file_order_wins():
    rules = LoraRules(rank_pattern={"layers.1.self_attn.q_proj": 32, "q_proj": 2, "model.layers.0.self_attn.q_proj": 4})
    assert [module_rule(rules, m).rank for m in (Q0, Q1, V11)] == [2, 32, 8]


def test_module_rule_matches_rank_and_alpha_patterns_apart():
    rules = LoraRules(rank=8, alpha=16, rank_pattern={"v_proj": 2}, alpha_pattern={"layers.11.self_attn.v_proj": 32})
    assert module_rule(rules, V11)[:2] == (2, 16.0)
    assert module_rule(rules, "model.layers.1.self_attn.v_proj")[:2] == (2, 8.0)


def test_module_rule_keys_are_regexes_that_must_match_whole_segments():
    rules = LoraRules(rank_pattern={r"layers\.(0|1)\..*": 2, "proj": 3, "attn.v_proj": 5, r"v_proj|o_proj": 7})
    assert [module_rule(rules, m).rank for m in (Q0, Q1, V11)] == [2, 2, 7]
    assert module_rule(rules, "model.layers.5.mlp.up_proj").rank == 8


def test_read_rules_absent_fields_have_defaults_of_peft():
    assert read_rules({}, name="x") == LoraRules(rank=8, alpha=8)
    assert read_rules({"rank_pattern": None, "use_rslora": None}, name="x") == LoraRules()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"r": 0}, "adapter 'x': r in adapter_config.json is 0; it must be a whole number from 1 to"),
        ({"r": -4}, "r in adapter_config.json is -4"),
        ({"r": True}, "r in adapter_config.json is true"),
        ({"r": 8.0}, "r in adapter_config.json is 8.0"),
        ({"r": None}, "r in adapter_config.json is null; it must be a whole number"),
        ({"r": 10**400}, "it must be a whole number from 1 to 1000000"),
        ({"lora_alpha": "16"}, 'lora_alpha in adapter_config.json is "16"; it must be a finite number'),
        ({"lora_alpha": math.nan}, "lora_alpha in adapter_config.json is NaN"),
        ({"lora_alpha": 10**400}, "it must be a finite number"),
        ({"rank_pattern": [1]}, "rank_pattern in adapter_config.json is [1]; it must be an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] in adapter_config.json is 0"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj'] in adapter_config.json is null"),
        ({"rank_pattern": {"(q": 4}}, 'a key of rank_pattern in adapter_config.json is "(q"; it must be a regex'),
        ({"use_rslora": "yes"}, 'use_rslora in adapter_config.json is "yes"; it must be true or false'),
    ],
)
def test_read_rules_of_a_wrong_value_names_field_and_value(fields, text):
    with pytest.raises(AdapterError, match=re.escape(text)):
        read_rules(fields, name="x")


_SEGMENTS = st.sampled_from(["q_proj", "k_proj", "self_attn.q_proj", "layers.1.self_attn.q_proj", "mlp.up_proj", "j"])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    keys=st.lists(_SEGMENTS, unique=True, max_size=4),
    layer=st.integers(0, 12),
    leaf=st.sampled_from(["q_proj", "k_proj"]),
)
def test_module_rule_agrees_with_suffix_matching_for_plain_keys(keys, layer, leaf):
    module = f"model.layers.{layer}.self_attn.{leaf}"
    pattern = {k: i + 1 for i, k in enumerate(keys)}
    wanted = next((rank for k, rank in pattern.items() if f".{module}".endswith(f".{k}")), 8)
    assert module_rule(LoraRules(rank_pattern=pattern), module).rank == wanted


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        r"model\.layers\.(0|1|10|11)\.self_attn\.(q_proj|k_proj|v_proj)",
        r".*layers\.\d+\..*q_proj",
        r"(?:model\.)?layers\.[0-9]+\.(?:self_attn|mlp)\.\w+_proj",
        r"^(?!.*vision).*q_proj",
        "(" + "|".join(f"layers.{i}.mlp.up_proj" for i in range(16)) + ")",
    ],
)
def test_read_rules_takes_regexes_that_people_write(key):
    assert list(read_rules({"rank_pattern": {key: 4}}, name="a").rank_pattern) == [key]


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        (r"(\w+)+!", "quick to match"),
        (r"(\w+\.?)*!", "quick to match"),
        (r"(o|o|de)+!", "quick to match"),
        (r"((\w|\w\w){2}){40}", "quick to match"),
        ("(a?)" * 40 + "!", "quick to match"),
        (".*" * 8 + "!", "quick to match"),
        ("(){4000000000}", "quick to match"),
        (r"(.)\1", "found GROUPREF"),
        ("x" * 501, "at most 500 characters, not 501"),
        ("(?i:ab|AB)" * 40 + "!", "without flags"),
        ("a)|(b", "a regex (unbalanced parenthesis"),
        ("a{99999999999999999999}", "a regex ("),
    ],
)
def test_read_rules_refuses_regexes_that_may_take_forever(field, key, text):
    with pytest.raises(AdapterError, match=f"a key of {field} .*it must be ") as caught:
        read_rules({field: {key: 4}}, name="a")
    assert text in str(caught.value)


def test_read_rules_slowest_regex_that_is_taken_matches_within_a_second():
    rules = read_rules({"rank_pattern": {".*.*.*(!|o?!)": 4}}, name="a")
    begin = time.perf_counter()
    assert module_rule(rules, "o" * 64).rank == 8
    assert time.perf_counter() - begin < 1
