"""Checkpoints of a run: parameters, optimizer state and what the host must remember, together.

A checkpoint at step s says that s optimizer steps are applied. The trajectory store rolls back to the
same s on resume, so that weights and consumed groups cannot disagree.
"""

from __future__ import annotations

import pathlib
from typing import Any

import orbax.checkpoint as ocp


class CheckpointManager:
    """Saves and restores training state under a run's `checkpoints/`.

    Args:
      folder: created when missing.
      keep: newest checkpoints that stay on disk.
    """

    def __init__(self, folder: pathlib.Path, keep: int):
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True))

    def latest_step(self) -> int | None:
        """The newest complete checkpoint; half-written ones are ignored."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: dict[str, Any], host: dict[str, Any]) -> None:
        """Begins to write; the arrays may be donated or replaced as soon as this returns."""
        self._manager.save(step, args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)))

    def restore(self, step: int, abstract_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a checkpoint onto the devices of `abstract_state` (ShapeDtypeStructs with shardings).

        Returns:
          state and host, as they were saved.
        """
        restored = self._manager.restore(step, args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), host=ocp.args.JsonRestore()))
        return restored["state"], restored["host"]

    def close(self) -> None:
        """Waits for writes to finish."""
        self._manager.wait_until_finished()
        self._manager.close()
