"""LoRA and attention strategies as functions over pages, the kernels they use, and the tables that name both."""

from strategies.kernel_tables import Kernel, Kernels, KernelSet, choose_kernels, describe_kernels
from strategies.kv_write import KvWrite, write_kv
from strategies.lanes import (
    ABSENT,
    BASE,
    SCRATCH_PAGES,
    AttentionLane,
    KvControl,
    KvLanes,
    LoraLane,
    Memory,
    Stripe,
    stripe_of,
)
from strategies.low_rank import CHUNK_ROWS
from strategies.paged_attention import CHUNK_TOKENS, NO_WINDOW, HeadMaths, Partial, finish, merge
from strategies.setting import AttentionSetting, LoraSetting
from strategies.strategy_table import ATTENTION, LORA

__all__ = [
    "ABSENT",
    "ATTENTION",
    "BASE",
    "CHUNK_ROWS",
    "CHUNK_TOKENS",
    "LORA",
    "NO_WINDOW",
    "SCRATCH_PAGES",
    "AttentionLane",
    "AttentionSetting",
    "HeadMaths",
    "Kernel",
    "KernelSet",
    "Kernels",
    "KvControl",
    "KvLanes",
    "KvWrite",
    "LoraLane",
    "LoraSetting",
    "Memory",
    "Partial",
    "Stripe",
    "choose_kernels",
    "describe_kernels",
    "finish",
    "merge",
    "stripe_of",
    "write_kv",
]
