"""Run by test_int8_adapters.py in a process with two devices: tokens of an engine with int8 adapters over one shard and
over two, as JSON."""

import json

from plora_jax.engine import SamplingParams
from tests.plora_jax.conformance import PACK, deploy, engine_over, golden

NAMES = ("all_linear", "rank48", "plain_qv", "embed_head_lora")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def main() -> None:
    found: dict = {}
    prompt = golden(None, "llama")["prompt_3"].tolist()
    for shards in (1, 2):
        sizes = {"page_tokens": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
        built = deploy("llama", lora_dtype="int8", tensor_parallel_size=shards, **sizes)
        engine = engine_over(built, built.executor, chunk=16)
        for name in NAMES:
            engine.load_adapter(name, str(PACK / "adapters" / name))
        answers = engine.generate([prompt] * len(NAMES), GREEDY, adapters=list(NAMES))
        found[str(shards)] = [completion.token_ids for (completion,) in answers]
    print(json.dumps(found))


main()
