"""A start with a folder of compiled programs, in a process of its own: one that was made in it would load anyway.

  python kept_start.py MODEL FOLDER OPTIONS

Prints one JSON object: the tokens of a completion, and how many programs were lowered and compiled.
"""

import json
import sys
from unittest import mock

from plora_jax.engine.build import EngineConfig, build_engine
from plora_jax.engine.compile import counter
from plora_jax.engine.executor import JaxExecutor
from plora_jax.engine.params import SamplingParams


def main() -> None:
    model, folder, options = sys.argv[1:]
    lower, lowered = JaxExecutor._lower, []

    def counted(*args):
        lowered.append(1)
        return lower(*args)

    with mock.patch.object(JaxExecutor, "_lower", counted):
        built = build_engine(
            EngineConfig(
                model=model,
                compilation_cache_dir=folder,
                max_model_len=64,
                max_num_seqs=2,
                max_num_batched_tokens=16,
                device_kv_mb=4,
                device_adapter_mb=4,
                pool_memory_gb=0.0625,
                **json.loads(options),
            )
        )
    before = counter.count
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = [token for part in built.engine.submit([5, 6, 7], sampling) for token in part.token_ids]
    print(json.dumps({"tokens": tokens, "lowered": len(lowered), "compiled in traffic": counter.count - before}))


if __name__ == "__main__":
    main()
