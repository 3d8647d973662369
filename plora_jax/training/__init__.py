"""Fine-tuning of LoRA adapters: examples in, an Adapter out, resumable at every checkpoint.

examples = tokenize(read_records("train.jsonl"), ModelChat(tokenizer, model.config), max_length=256)
plan = BatchPlan(examples.examples, config.batch_size, max_length=256, seed=config.seed)
trainer = Trainer(model.config, config, total_steps=total_steps(config, len(plan)))
result = run(trainer, model.params, config, plan=plan, held_out=[], checkpoints=None)
adapter = to_adapter(result.lora, config, name="mine", base="default")
"""

from plora_jax.training.batches import Batch, BatchPlan
from plora_jax.training.chat import ModelChat
from plora_jax.training.checkpoints import RunCheckpoints
from plora_jax.training.config import SCHEDULES, TrainConfig, TrainingError
from plora_jax.training.data import ChatFormat, Example, Examples, read_records, split, tokenize
from plora_jax.training.loop import Progress, Result, run, total_steps
from plora_jax.training.lora import LoraParams, init_lora, to_adapter
from plora_jax.training.step import Trainer, TrainState

__all__ = [
    "SCHEDULES",
    "Batch",
    "BatchPlan",
    "ChatFormat",
    "Example",
    "Examples",
    "LoraParams",
    "ModelChat",
    "Progress",
    "Result",
    "RunCheckpoints",
    "TrainConfig",
    "TrainState",
    "Trainer",
    "TrainingError",
    "init_lora",
    "read_records",
    "run",
    "split",
    "to_adapter",
    "tokenize",
    "total_steps",
]
