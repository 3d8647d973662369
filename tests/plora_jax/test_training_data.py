"""Examples: what is read, what is learned, what is refused."""

import json

import numpy as np
import pytest

from plora_jax.training.batches import BatchPlan
from plora_jax.training.config import TrainingError
from plora_jax.training.data import Example, read_records, split, tokenize

EOS = 1


class LetterChat:
    """A chat format in which every character is a token and "." ends a turn."""

    eos_token_ids = (EOS,)

    def encode(self, text, *, start):
        return ([0] if start else []) + [EOS if letter == "." else ord(letter) for letter in text]

    def render(self, messages, *, add_generation_prompt):
        turns = "".join(f"{message['role'][0]}:{message['content']}.\n" for message in messages)
        return turns + ("a:" if add_generation_prompt else "")


class ForgetfulChat(LetterChat):
    """A template that leaves answers out once another turn follows."""

    def render(self, messages, *, add_generation_prompt):
        kept = [m for m in messages[:-1] if m["role"] != "assistant"] + list(messages[-1:])
        return super().render(kept, add_generation_prompt=add_generation_prompt)


def _write(tmp_path, *lines):
    path = tmp_path / "examples.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def _chat(*contents):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def _learned_text(example):
    return "".join("." if t == EOS else chr(t) for t in example.token_ids[example.learned])


def test_read_records_chat_and_text_are_kept_in_order(tmp_path):
    path = _write(tmp_path, _chat("hi", "ho"), "", {"text": "plain"})
    assert read_records(path) == [_chat("hi", "ho"), {"text": "plain"}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{oops", "examples.jsonl:2: not JSON: Expecting property name"),
        ("[1]", 'examples.jsonl:2: an example is an object with either "messages" or "text", got [1].'),
        ({"text": "a", "messages": []}, 'with either "messages" or "text"'),
        ({"text": 3}, "examples.jsonl:2: text must be a string that is not empty, got 3."),
        ({"messages": []}, "messages must be a list that is not empty, got []."),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "messages[0].role must be one of system, user, assistant, got 'bot'.",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content must be a string that is not empty"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message has the role assistant"),
    ],
)
def test_read_records_bad_line_names_file_line_and_problem(tmp_path, line, problem):
    with pytest.raises(TrainingError) as error:
        read_records(_write(tmp_path, {"text": "good"}, line))
    assert problem in str(error.value)


def test_read_records_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"cannot read .*nowhere.jsonl: No such file"):
        read_records(tmp_path / "nowhere.jsonl")
    with pytest.raises(TrainingError, match="holds no example"):
        read_records(_write(tmp_path, ""))


def test_tokenize_chat_learns_answers_up_to_their_end_token():
    examples = tokenize([_chat("hi", "ho", "so", "yes")], LetterChat(), max_length=99).examples
    assert _learned_text(examples[0]) == "ho.yes."


def test_tokenize_chat_prompt_is_the_rendered_prompt():
    (example,) = tokenize([_chat("hi", "ho")], LetterChat(), max_length=99).examples
    prompt = LetterChat().encode("u:hi.\na:", start=False)
    assert example.token_ids[: len(prompt)].tolist() == prompt
    assert not example.learned[: len(prompt)].any()


def test_tokenize_text_learns_everything_and_ends_with_the_end_token():
    (example,) = tokenize([{"text": "abc"}], LetterChat(), max_length=99).examples
    assert example.token_ids.tolist() == [0, 97, 98, 99, EOS]
    assert example.learned.all()


def test_tokenize_long_examples_are_cut_and_counted():
    result = tokenize([_chat("hi", "hohoho"), _chat("hello there", "x")], LetterChat(), max_length=10)
    assert (len(result.examples), result.truncated, result.dropped) == (1, 2, 1)
    assert _learned_text(result.examples[0]) == "ho"


def test_tokenize_template_that_rewrites_earlier_turns_is_refused():
    with pytest.raises(TrainingError, match="the chat template changes earlier turns"):
        tokenize([_chat("hi", "ho", "so", "yes")], ForgetfulChat(), max_length=99)


def test_split_is_a_partition_chosen_by_the_seed():
    records = [{"text": str(i)} for i in range(20)]
    train, held_out = split(records, 0.2, seed=3)
    assert len(held_out) == 4
    assert sorted(train + held_out, key=lambda r: int(r["text"])) == records
    assert (train, held_out) == split(records, 0.2, seed=3)
    assert held_out != split(records, 0.2, seed=4)[1]


def test_split_bad_fraction_is_refused():
    with pytest.raises(TrainingError, match=r"eval_fraction must be at least 0 and below 1, got 1.5"):
        split([{"text": "a"}] * 3, 1.5, seed=0)


def _examples(*lengths):
    return [Example(np.full(n, n, np.int32), np.ones(n, bool)) for n in lengths]


def test_batch_plan_shapes_are_few_and_every_example_comes_once_an_epoch():
    lengths = [5, 70, 31, 33, 64, 8, 79, 12, 40]
    plan = BatchPlan(_examples(*lengths), 2, max_length=80, seed=1)
    batches = [plan.training_batch(i) for i in range(len(plan))]
    assert {batch.tokens_BT.shape[1] for batch in batches} <= {32, 64, 80}
    assert {batch.tokens_BT.shape[0] for batch in batches} == {2}
    seen = [int(row[0]) for batch in batches for row in batch.tokens_BT if row[0]]
    assert sorted(seen) == sorted(lengths)


def test_batch_plan_order_depends_on_seed_and_epoch_alone():
    def order(seed, first):
        plan = BatchPlan(_examples(*range(2, 26)), 4, max_length=32, seed=seed)
        return [plan.training_batch(first * len(plan) + i).tokens_BT.tolist() for i in range(len(plan))]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 0)
    assert order(0, 1) != order(1, 1)


def test_batch_plan_padding_and_first_tokens_are_not_learned():
    plan = BatchPlan(_examples(3, 4, 5), 2, max_length=32, seed=0)
    batches = plan.all_batches()
    assert sum(int(batch.learned_BT.sum()) for batch in batches) == 2 + 3 + 4
    assert sum(batch.num_tokens for batch in batches) == 12


def test_batch_plan_fingerprint_tells_data_apart():
    def fingerprint(examples, batch_size=2, seed=0):
        return BatchPlan(examples, batch_size, max_length=32, seed=seed).fingerprint()

    same = fingerprint(_examples(3, 4))
    assert same == fingerprint(_examples(3, 4))
    assert len({same, fingerprint(_examples(4, 3)), fingerprint(_examples(3, 4), seed=1)}) == 3
