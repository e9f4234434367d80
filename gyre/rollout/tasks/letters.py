"""Letters: say lowercase letters. The smallest task with a dense score, for a model that knows nothing.

A random byte-level model gets about 0.1 and improves within a few steps, so that tests and
configs/tiny.py exercise every stage of a run in seconds. The harness must keep the answers in
`answer.txt` (the reference harness does with `answer_file="answer.txt"`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from gyre.base.enums import ScoreStatus
from gyre.base.errors import ConfigError
from gyre.base.protocols import Score, Task

ANSWER_FILE = "answer.txt"
_MAX_READ_BYTES = 1 << 16


class Letters:
    """A TaskSource; its score is the fraction of lowercase ASCII letters in all that was said.

    Args:
      seed: another seed is another sequence.
      max_turns: a task asks 1 to so many times.
      held_out: number of held-out tasks.
    """

    def __init__(self, seed: int = 0, max_turns: int = 1, held_out: int = 8):
        if max_turns < 1 or held_out < 0:
            raise ConfigError(f"max_turns must be at least 1 and held_out not negative, got "
                              f"{max_turns} and {held_out}")
        self.seed, self.max_turns, self._n_held_out = seed, max_turns, held_out

    def task(self, index: int) -> Task:
        """The i-th training task, i >= 0. Pure."""
        if index < 0:
            raise ValueError(f"a task index must not be negative, got {index}")
        return self._make("train", index)

    def held_out(self) -> Sequence[Task]:
        """Tasks for evaluation."""
        return [self._make("test", i) for i in range(self._n_held_out)]

    def _make(self, split: str, index: int) -> Task:
        turns = 1 + index % self.max_turns
        start = random.Random(f"letters/{self.seed}/{split}/{index}").choice("abcdefgh")
        lines = [f"Say {chr(ord(start) + i)}." for i in range(turns)]
        instruction = lines[0] if turns == 1 else "\n".join(
            f"{i}. {line}" for i, line in enumerate(lines, 1))
        return Task(task_id=f"letters-{self.seed}-{split}-{index}", instruction=instruction,
                    kind=f"{turns} turns")

    @staticmethod
    def grade(task: Task, workspace: Path) -> Score:
        """Fraction of lowercase letters among the answers' characters, line ends apart."""
        path = workspace / ANSWER_FILE
        if path.is_symlink() or not path.is_file():
            return Score(0.0, ScoreStatus.OK, f"no {ANSWER_FILE}")
        with path.open("rb") as file:
            text = file.read(_MAX_READ_BYTES).decode("utf-8", "replace").replace("\n", "")
        letters = sum("a" <= c <= "z" for c in text)
        return Score(letters / len(text) if text else 0.0, ScoreStatus.OK,
                     f"{letters} of {len(text)} characters are lowercase letters")
