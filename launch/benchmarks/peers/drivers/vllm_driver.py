"""vLLM on the CPU, offline, all requests at once; its adapters in the batch as it is made for.

Run by the peer's interpreter: python vllm_driver.py JOB.json; prints one JSON object.
"""

import json
import os
import sys
import time

MOST_RANK = 64


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    # They are read when it is imported.
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[: job["threads"]]))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    adapters = [LoRARequest(f"a{number}", number + 1, path) for number, path in enumerate(job["adapters"])]
    many = max(len(adapters), 1)
    llm = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        enable_lora=bool(adapters),
        max_loras=many,
        max_cpu_loras=many,
        max_lora_rank=MOST_RANK,
        max_num_seqs=max(len(prompts) for prompts in job["runs"]),
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True)
    seconds = []
    for prompts in job["runs"]:
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        lora = [adapters[row % many] for row in range(len(prompts))] if adapters else None
        started = time.perf_counter()
        out = llm.generate(requests, sampling, lora_request=lora, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        assert all(len(answer.outputs[0].token_ids) == job["new_tokens"] for answer in out)
    print(json.dumps({"version": f"vLLM {vllm.__version__}", "seconds": seconds}))


if __name__ == "__main__":
    main()
