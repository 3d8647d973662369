"""LoRA and attention strategies as functions over device state, and the tables that name them."""

from strategies.attention import CHUNK_TOKENS, NO_WINDOW, AttentionLane, HeadMaths, KvPages, KvWrite, write_kv
from strategies.kernels import Kernel, Kernels, KernelSet, choose_kernels, describe_kernels
from strategies.lora import BASE, CHUNK_ROWS, NOBODY, LoraLane
from strategies.registry import ATTENTION, LORA, AttentionStrategy, LoraStrategy

__all__ = [
    "ATTENTION",
    "BASE",
    "CHUNK_ROWS",
    "CHUNK_TOKENS",
    "LORA",
    "NOBODY",
    "NO_WINDOW",
    "AttentionLane",
    "AttentionStrategy",
    "HeadMaths",
    "Kernel",
    "KernelSet",
    "Kernels",
    "KvPages",
    "KvWrite",
    "LoraLane",
    "LoraStrategy",
    "choose_kernels",
    "describe_kernels",
    "write_kv",
]
