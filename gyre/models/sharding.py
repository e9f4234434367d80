"""Which mesh axis each parameter dimension lies on: the parallel layout inside a cell.

A cell's mesh has the axes `fsdp` and `tensor`. Matrices are split over `tensor` along heads, MLP width
or vocabulary and over `fsdp` along the model width; a dimension that an axis does not divide stays
whole (SmolLM2's 9 heads over tensor=2, for example).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gyre.models import dense

MESH_AXES = ("fsdp", "tensor")


def axis_if_divisible(mesh: Mesh, axis: str, units: int) -> str | None:
    """`axis` when it splits `units` evenly, else None (replicate)."""
    return axis if units % mesh.shape[axis] == 0 else None


def param_specs(config: dense.ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """PartitionSpec of every parameter, in the structure of `dense.init_params`."""
    c = config
    wide = axis_if_divisible(mesh, "fsdp", c.d_model)
    heads = axis_if_divisible(mesh, "tensor", c.num_heads)
    kv_heads = axis_if_divisible(mesh, "tensor", c.num_kv_heads)
    mlp = axis_if_divisible(mesh, "tensor", c.d_ff)
    vocab = axis_if_divisible(mesh, "tensor", c.vocab_size)
    if heads is None or kv_heads is None:
        heads = kv_heads = None  # queries stay beside their keys
    spec = PartitionSpec
    specs: dict[str, Any] = {
        "embed": spec(vocab, wide), "final_norm": spec(),
        "blocks": {
            "attn_norm": spec(), "mlp_norm": spec(),
            "q": spec(None, heads, wide), "k": spec(None, kv_heads, wide),
            "v": spec(None, kv_heads, wide), "o": spec(None, wide, heads),
            "gate": spec(None, mlp, wide), "up": spec(None, mlp, wide), "down": spec(None, wide, mlp),
        }}
    if not c.tie_embeddings:
        specs["unembed"] = spec(vocab, wide)
    return specs


def param_shardings(config: dense.ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """NamedSharding of every parameter on a cell's mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), param_specs(config, mesh),
                        is_leaf=lambda s: isinstance(s, PartitionSpec))
