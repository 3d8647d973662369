"""After warm-up, traffic compiles nothing, whatever is mixed."""

import random

import pytest

from plora_jax.engine import SamplingParams
from plora_jax.engine.compile import counter
from tests.plora_jax.conformance import PACK, adapters_of, deploy


def random_request(rng):
    prompt = [rng.randrange(3, 256) for _ in range(rng.choice([1, 2, 7, 30, 90]))]
    options = {"max_tokens": rng.randrange(1, 12), "n": rng.choice([1, 1, 1, 2])}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.0, 0.5, 1.3]), "top_p": rng.choice([1.0, 0.8])}
        options |= {"top_k": rng.choice([0, 1, 40]), "min_p": rng.choice([0.0, 0.1]), "seed": rng.randrange(100)}
    if rng.random() < 0.3:
        options |= {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {5: 2.0, 9: -3.0}}
    if rng.random() < 0.3:
        options |= {"logprobs": rng.randrange(0, 20), "prompt_logprobs": rng.randrange(0, 20)}
    if rng.random() < 0.2:
        options |= {"stop_token_ids": (rng.randrange(256),), "min_tokens": 1}
    return prompt, SamplingParams(**options)


@pytest.mark.slow
def test_hundreds_of_mixed_batches_compile_nothing():
    built = deploy("llama", device_adapter_mb=1)
    engine, rng = built.engine, random.Random(4)
    names = adapters_of("llama")
    compiled, steps = counter.count, 0
    assert compiled > 0, "the counter must have seen the warm-up"
    waiting = []
    while steps < 400:
        if rng.random() < 0.5 and len(waiting) < 20:
            name = rng.choice([None, *names])
            if name and name not in {a.name for a in engine.adapters()}:
                engine.load_adapter(name, str(PACK / "adapters" / name))
            prompt, sampling = random_request(rng)
            waiting.append(engine.submit(prompt, sampling, adapter=name))
        if rng.random() < 0.03 and engine.adapters():
            engine.unload_adapter(rng.choice(engine.adapters()).name)
        if rng.random() < 0.03 and waiting:
            waiting.pop(rng.randrange(len(waiting))).cancel()
        engine.step()
        engine.check_integrity()
        built.adapters.check_integrity()
        steps += 1
        waiting = [g for g in waiting if g.times.finished_s is None]
    assert counter.count == compiled, f"{counter.count - compiled} programs were compiled in traffic"
