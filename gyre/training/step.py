"""The micro-step: one packed, fixed-shape forward and backward pass, compiled per cell.

This is where model, tree operations and algorithm meet. Gradients and metrics leave as sums over
the micro-step's trained tokens (weights are in the batch); whoever applies them divides once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gyre.base.errors import ConfigError
from gyre.models import dense, sharding
from gyre.ops.tree_loss import BATCH_FIELDS, PolicyLoss, micro_loss
from gyre.training.accumulate import make_add

if TYPE_CHECKING:
    from gyre.trajectory.packing import MicroStep

MicroStepFn = Callable[[dense.Params, Mapping[str, jax.Array]],
                       tuple[dense.Params, dict[str, jax.Array]]]


def batch_arrays(micro: MicroStep) -> dict[str, np.ndarray]:
    """The arrays of a packed micro-step that go to the device, named as `BATCH_FIELDS`.

    Raises:
      ValueError: a dtype that would compile another program.
    """
    batch = {name: np.asarray(getattr(micro, name)) for name in BATCH_FIELDS}
    wrong = {n: str(a.dtype) for n, a in batch.items() if str(a.dtype) != BATCH_FIELDS[n]}
    if wrong:
        raise ValueError(f"micro-step arrays have dtypes {wrong}, expected {BATCH_FIELDS}")
    return batch


def abstract_batch(n_tokens: int, n_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a micro-step of N tokens and R rows, to compile ahead."""
    per_row = ("rows", "w", "adv", "old_logp")
    return {name: jax.ShapeDtypeStruct((n_rows if name in per_row else n_tokens,), np.dtype(dtype))
            for name, dtype in BATCH_FIELDS.items()}


def make_micro_step(config: dense.ModelConfig, policy_loss: PolicyLoss, temperature: float,
                    remat: str = "full", *, chunk_rows: int = 256,
                    block_size: int | None = None) -> MicroStepFn:
    """A pure function (params, batch) -> (gradient sums, metric sums), to be jit-compiled.

    Args:
      config: the model's shape.
      policy_loss: an algorithm's `loss`.
      temperature: that the trained tokens were sampled at.
      remat: what the backward pass recomputes. "none" keeps every activation; "attention"
        recomputes each layer's attention; "full" recomputes each layer from its input; any other
        string names a `jax.checkpoint_policies` member.
      chunk_rows: see `ops.token_logprobs`.
      block_size: see `ops.tree_attention`.

    Raises:
      ConfigError: an unknown `remat`, a temperature that gives no log-probs.
    """
    if remat not in ("none", "attention", "full") and not hasattr(jax.checkpoint_policies, remat):
        raise ConfigError(f"optimizer.remat={remat!r} is unknown; expected none, attention, full "
                          "or the name of a jax.checkpoint_policies member")
    if not temperature > 0:
        raise ConfigError(f"generation.temperature={temperature} cannot be trained on: greedy "
                          "decoding has no log-probs; set it above 0")
    layer_remat = None if remat in ("none", "attention") else remat

    def micro_step(params, batch):
        def loss(params):
            def forward_hidden(tokens, pos, attend):
                return dense.forward(config, params, tokens, pos, attend, remat=layer_remat)[0]

            return micro_loss(forward_hidden, dense.unembedding(config, params), batch, policy_loss,
                              temperature, chunk_rows=chunk_rows, block_size=block_size,
                              remat_attention=remat == "attention")

        return jax.grad(loss, has_aux=True)(params)

    return micro_step


@dataclasses.dataclass(frozen=True)
class TrainPrograms:
    """What a cell trains with, before its devices are known. Fields as in `make_micro_step`."""

    model: dense.ModelConfig
    policy_loss: PolicyLoss
    temperature: float
    remat: str = "full"
    chunk_rows: int = 256
    block_size: int | None = None

    def __post_init__(self):
        self.function()  # refuses bad settings before any device work

    def function(self) -> MicroStepFn:
        """The micro-step as a pure function."""
        return make_micro_step(self.model, self.policy_loss, self.temperature, self.remat,
                               chunk_rows=self.chunk_rows, block_size=self.block_size)

    def on(self, mesh: Mesh) -> PlacedPrograms:
        """The programs over a cell's mesh."""
        return PlacedPrograms(self, mesh)


class PlacedPrograms:
    """Training programs of one cell: parameters and gradients sharded alike, batches replicated.

    Attributes:
      add: sums two gradients on this mesh, consuming the first (`accumulate.make_add`).
    """

    def __init__(self, programs: TrainPrograms, mesh: Mesh):
        self.param_shardings = sharding.param_shardings(programs.model, mesh)
        whole = NamedSharding(mesh, PartitionSpec())
        self._micro_step = jax.jit(programs.function(), in_shardings=(self.param_shardings, whole),
                                   out_shardings=(self.param_shardings, whole))
        self.add = make_add(self.param_shardings)

    def micro_step(self, params: dense.Params,
                   micro: MicroStep) -> tuple[dense.Params, dict[str, jax.Array]]:
        """Gradient sums (placed like the parameters) and metric sums (scalars) of a micro-step."""
        return self._micro_step(params, batch_arrays(micro))

    def warm(self, params: dense.Params, shape: tuple[int, int]) -> None:
        """Compiles the micro-step for (N, R) = `shape`, and the sum.

        The programs are compiled, not run, so that a warm-up costs no gradient memory.
        """
        abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        self._micro_step.lower(abstract, abstract_batch(*shape)).compile()
        self.add.lower(abstract, abstract).compile()
