"""PEFT and transformers on the CPU: one padded batch in which each row has an adapter of its own.

Run by the peer's interpreter: python peft_driver.py JOB.json; prints one JSON object.
"""

import json
import sys
import time

import peft  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    names = [f"a{number}" for number in range(len(job["adapters"]))]
    for name, path in zip(names, job["adapters"], strict=True):
        if name == "a0":
            model = peft.PeftModel.from_pretrained(model, path, adapter_name=name)
        else:
            model.load_adapter(path, adapter_name=name)
    model.eval()
    seconds = []
    for prompts in job["runs"]:
        ids = torch.tensor(prompts)
        options = {"adapter_names": [names[row % len(names)] for row in range(len(prompts))]} if names else {}
        length = {"max_new_tokens": job["new_tokens"], "min_new_tokens": job["new_tokens"], "do_sample": False}
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **length, **options)
        seconds.append(time.perf_counter() - started)
        assert out.shape[1] == ids.shape[1] + job["new_tokens"], out.shape
    version = f"PEFT {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"version": version, "seconds": seconds}))


if __name__ == "__main__":
    main()
