"""OpenVINO GenAI on the CPU, straight from a GGUF file, with continuous batching; the base model only.

It takes prompts as text: words of one token each, as many as the prompts have tokens.
Run by the peer's interpreter: python openvino_driver.py JOB.json; prints one JSON object.
"""

import json
import random
import sys
import time

import openvino_genai  # pyright: ignore[reportMissingImports]

WORDS = ["river", "stone", "cloud", "green", "seven", "paper", "light", "music", "house", "train"]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    rng = random.Random(0)
    most = max(len(prompts) for prompts in job["runs"])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, most, 2048
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(job["gguf"], "CPU", scheduler_config=scheduler)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = job["new_tokens"], True, False
    config.apply_chat_template = False
    seconds = []
    for prompts in job["runs"]:
        texts = [" ".join(rng.choice(WORDS) for _ in ids) for ids in prompts]
        started = time.perf_counter()
        pipeline.generate(texts, config)
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"version": f"OpenVINO GenAI {openvino_genai.__version__}, GGUF as it is", "seconds": seconds}))


if __name__ == "__main__":
    main()
