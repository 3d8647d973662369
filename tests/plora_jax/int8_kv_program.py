"""Run by test_int8_kv.py in a process with two devices: tokens of an engine with int8 KV over one shard and over two,
as JSON."""

import json

import numpy as np

from plora_jax.engine import SamplingParams
from tests.plora_jax.conformance import deploy, engine_over

PROMPTS = [np.random.default_rng(i).integers(3, 250, count).tolist() for i, count in enumerate((40, 9, 23))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def main() -> None:
    found: dict = {"heads": []}
    for shards in (1, 2):
        sizes = {"page_tokens": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "enable_lora": False}
        built = deploy("llama", kv_cache_dtype="int8", tensor_parallel_size=shards, **sizes)
        built.kv._most_copies = 0
        built.executor._attention_of = lambda sequence: ("local", "distributed")[sequence.seq_id % 2]
        answers = engine_over(built, built.executor, chunk=16).generate(PROMPTS, GREEDY)
        found["heads"].append(built.memory.layout.kv_heads)
        found[str(shards)] = [completion.token_ids for (completion,) in answers]
    print(json.dumps(found))


main()
