"""Training: the loss falls, gradients are those of the mean loss, a resumed run is the uninterrupted one."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.config import ModelConfig, RopeConfig
from plora_jax.model import LoraWeights, forward_full
from plora_jax.training.batches import BatchPlan
from plora_jax.training.checkpoints import RunCheckpoints
from plora_jax.training.config import TrainConfig, TrainingError
from plora_jax.training.data import Example
from plora_jax.training.loop import run, total_steps
from plora_jax.training.lora import init_lora, to_adapter
from plora_jax.training.step import Trainer, learning_rate

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position=64,
    norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    query_scale=0.5,
)
CONFIG = TrainConfig(
    rank=4,
    alpha=8,
    targets=("q_proj", "v_proj", "down_proj"),
    learning_rate=2e-2,
    batch_size=4,
    max_length=16,
    epochs=2,
)


def _params():
    rng = np.random.default_rng(0)
    params = {"layers": {}}
    for path, shape in MODEL.param_shapes().items():
        value = np.ones(shape) if path.endswith("norm") else rng.normal(size=shape) * 0.3
        group, _, leaf = path.rpartition(".")
        (params[group] if group else params)[leaf] = jnp.asarray(value, jnp.float32)
    return params


PARAMS = _params()


def _examples(count, seed=0):
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        length = int(rng.integers(6, 16))
        # A pattern that an adapter can pick up: one answer token, repeated.
        ids = np.concatenate([rng.integers(8, 40, size=3), np.full(length - 3, 7)]).astype(np.int32)
        examples.append(Example(ids, np.arange(length) >= 3))
    return examples


def _plan(config=CONFIG, count=12):
    return BatchPlan(_examples(count), config.batch_size, max_length=config.max_length, seed=config.seed)


@functools.cache
def _trainer(config=CONFIG):
    return Trainer(MODEL, config, total_steps=total_steps(config, len(_plan(config))))


def _checkpoints(path, config=CONFIG, data="d"):
    total = total_steps(config, len(_plan(config)))
    return RunCheckpoints(path, config, model="tiny", data=data, total_steps=total)


def _run(config=CONFIG, checkpoints=None, **options):
    return run(_trainer(config), PARAMS, config, plan=_plan(config), held_out=[], checkpoints=checkpoints, **options)


def test_init_lora_is_the_base_model_with_peft_bounds():
    lora = init_lora(MODEL, CONFIG)
    assert {name: a.shape for name, a in lora["a"].items()}["down_proj"] == (2, 4, 24)
    assert all(not b.any() for b in lora["b"].values())
    largest = float(jnp.abs(lora["a"]["down_proj"]).max())
    assert 0.9 / 24**0.5 < largest <= 1 / 24**0.5


def test_run_loss_falls_on_held_out_examples_and_base_stays():
    before = jax.tree.map(np.array, PARAMS)
    trainer, seen = _trainer(), []
    held_out = BatchPlan(_examples(6, seed=9), 4, max_length=16, seed=0).all_batches()
    base = trainer.evaluate(PARAMS, trainer.init().lora, held_out)
    result = run(trainer, PARAMS, CONFIG, plan=_plan(), held_out=held_out, checkpoints=None, observe=seen.append)
    assert result.finished
    assert [progress.step for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert [progress.eval_loss is not None for progress in seen] == [False, False, True] * 2
    assert seen[-1].eval_loss < 0.8 * base
    jax.tree.map(np.testing.assert_array_equal, before, PARAMS)


def test_evaluate_is_the_mean_loss_of_learned_tokens():
    batch = _plan().all_batches()[0]
    logits = forward_full(PARAMS, MODEL, jnp.asarray(batch.tokens_BT))
    logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    losses = [-logprobs[row, place - 1, batch.tokens_BT[row, place]] for row, place in np.argwhere(batch.learned_BT)]
    got = _trainer().evaluate(PARAMS, init_lora(MODEL, CONFIG), [batch])
    np.testing.assert_allclose(got, np.mean(losses), rtol=1e-5)


def test_step_accumulated_batches_equal_one_large_batch():
    small = BatchPlan(_examples(4), 2, max_length=16, seed=0).all_batches()
    large = BatchPlan(_examples(4), 4, max_length=16, seed=0).all_batches()
    trainer = _trainer()
    (a, loss_a), (b, loss_b) = trainer.step(PARAMS, trainer.init(), small), trainer.step(PARAMS, trainer.init(), large)
    np.testing.assert_allclose(loss_a, loss_b, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), a.lora, b.lora)


def test_step_padding_and_empty_rows_change_nothing():
    (batch,) = BatchPlan(_examples(3), 3, max_length=16, seed=0).all_batches()
    padded = batch._replace(
        tokens_BT=np.pad(batch.tokens_BT, ((0, 2), (0, 8))), learned_BT=np.pad(batch.learned_BT, ((0, 2), (0, 8)))
    )
    trainer = _trainer()
    loss = trainer.evaluate(PARAMS, trainer.init().lora, [batch])
    np.testing.assert_allclose(trainer.evaluate(PARAMS, trainer.init().lora, [padded]), loss, rtol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_run_stopped_and_resumed_equals_uninterrupted(tmp_path, accumulation):
    config = dataclasses.replace(CONFIG, accumulation=accumulation, epochs=2 * accumulation)
    whole = _run(config)
    calls = iter([False, True])
    with _checkpoints(tmp_path / "c", config) as checkpoints:
        stopped = _run(config, checkpoints, should_stop=lambda: next(calls))
    assert (stopped.step, stopped.finished) == (2, False)
    with _checkpoints(tmp_path / "c", config) as checkpoints:
        resumed = _run(config, checkpoints, resume=True)
    assert (resumed.step, resumed.finished) == (whole.step, True)
    jax.tree.map(np.testing.assert_array_equal, whole.lora, resumed.lora)


def test_checkpoints_keep_the_newest(tmp_path):
    config = dataclasses.replace(CONFIG, save_every=1, keep=2)
    with _checkpoints(tmp_path / "c", config) as checkpoints:
        _run(config, checkpoints)
    assert sorted(int(p.name) for p in (tmp_path / "c").iterdir() if p.name.isdigit()) == [5, 6]


def test_checkpoints_of_another_run_are_refused_with_every_difference(tmp_path):
    with _checkpoints(tmp_path / "c") as checkpoints:
        _run(checkpoints=checkpoints)
    other = dataclasses.replace(CONFIG, learning_rate=1.0, keep=5)
    with _checkpoints(tmp_path / "c", other, data="e") as checkpoints, pytest.raises(TrainingError) as error:
        _run(other, checkpoints, resume=True)
    assert "learning_rate: was 0.02, is 1.0" in str(error.value)
    assert "the training examples (or their order): was 'd', is 'e'" in str(error.value)
    assert "keep" not in str(error.value).split("give")[0]


def test_checkpoints_nothing_to_resume_is_refused(tmp_path):
    with (
        _checkpoints(tmp_path / "c") as checkpoints,
        pytest.raises(TrainingError, match=r"there is no checkpoint in .*: start the run without --resume"),
    ):
        _run(checkpoints=checkpoints, resume=True)


def test_run_over_an_earlier_run_is_refused(tmp_path):
    with _checkpoints(tmp_path / "c") as checkpoints:
        _run(checkpoints=checkpoints)
        with pytest.raises(TrainingError, match=r"holds a checkpoint of step 6: go on from it with --resume"):
            _run(checkpoints=checkpoints)


def test_run_loss_not_finite_stops_and_saves_nothing(tmp_path):
    def forward(params, tokens_BT, lora):
        return forward_full(params, MODEL, tokens_BT, lora=lora) * jnp.nan

    config = dataclasses.replace(CONFIG, save_every=1)
    trainer = Trainer(MODEL, config, total_steps=4, forward=forward)
    with _checkpoints(tmp_path / "c", config) as checkpoints:
        with pytest.raises(TrainingError, match=r"the loss is nan .* at step 1 of 6: lower the learning rate"):
            run(trainer, PARAMS, config, plan=_plan(), held_out=[], checkpoints=checkpoints)
        assert checkpoints.latest_step() is None


def test_learning_rate_rises_then_falls_to_zero():
    config = dataclasses.replace(CONFIG, warmup_fraction=0.25)
    schedule = [float(learning_rate(config, 8)(step)) for step in range(9)]
    np.testing.assert_allclose(schedule[:3], [0.02 / 3, 0.04 / 3, 0.02], rtol=1e-6)
    assert schedule[2:] == sorted(schedule[2:], reverse=True)
    assert schedule[8] == 0
    assert float(learning_rate(dataclasses.replace(config, schedule="constant"), 8)(7)) == pytest.approx(0.02)


def test_train_config_lists_every_problem():
    config = TrainConfig(rank=0, schedule="step", targets=("q_proj", "w_proj"))
    with pytest.raises(TrainingError) as error:
        config.validate(("q_proj", "v_proj"))
    assert str(error.value) == (
        "rank must be at least 1, got 0; schedule must be one of cosine, linear, constant, got 'step'; targets must be "
        "a choice without repeats from q_proj, v_proj, got ('q_proj', 'w_proj')."
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_to_adapter_has_the_effect_that_was_trained(rslora):
    config = dataclasses.replace(CONFIG, rslora=rslora)
    lora = _run(config).lora
    adapter = to_adapter(lora, config, name="x", base="tiny")
    json.dumps(adapter.config)
    assert adapter.config["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    merged = {**PARAMS, "layers": dict(PARAMS["layers"])}
    for (layer, name), module in adapter.modules.items():
        delta = module.scale * module.b @ module.a
        merged["layers"][name] = merged["layers"][name].at[layer].add(delta)
    tokens = jnp.asarray(_plan().all_batches()[0].tokens_BT)
    weights = LoraWeights(a=lora["a"], b=lora["b"], scale=config.scale)
    trained = forward_full(PARAMS, MODEL, tokens, lora=weights)
    np.testing.assert_allclose(forward_full(merged, MODEL, tokens), trained, atol=2e-4)
    assert np.abs(trained - forward_full(PARAMS, MODEL, tokens)).max() > 0.1
