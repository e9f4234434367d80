"""Procedural shell jobs: short instructions in a folder, verifiable, with partial progress.

A task has one or more sub-goals on distinct files, so that each is graded alone; more than one
are given as a numbered list. Invariants: `task(i)` depends on the constructor's arguments and i
only; every window of len(kinds) tasks has each kind once as its first sub-goal; names in held-out
tasks never occur in training; no check holds in the initial workspace; deleting everything
satisfies no check.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from gyre.base.errors import ConfigError
from gyre.base.protocols import Task
from gyre.rollout.graders import checks

_WORDS = """
acorn amber anchor apple apron arrow aspen badge bagel baker bamboo banana banjo barley barn basil
basket beach bean bear beaver berry birch bison blade blanket bloom boat bonnet book boot bottle
bowl branch bread brick bridge broom brush bucket butter button cabin cable cactus camel candle
canoe canvas carpet carrot castle cave cedar cello chair chalk cheese cherry chess cider clay cliff
clock cloud clover coal coat cobra coconut coffee comet copper coral corn cotton cradle crane
crayon cricket crow crown cup curtain daisy desert desk dingo donkey door dove dragon drum duck
eagle ember engine falcon feather fern ferry fiddle field fig finch flag flame flour flute forest
fox frog garden garlic ginger glass glove goat grape grass guitar hammer harbor harp hazel hedge
heron hill honey horn horse igloo iris iron island ivory ivy jacket jade jar jungle kayak kettle
kite kiwi ladder lake lamp lantern lark laurel lava leaf lemon lentil lily linen lion lizard lobster
lotus lunch lynx magnet mango maple marble market meadow melon mill mint mirror moon moose moss
moth mountain mule mushroom nest nickel nut oak oasis oat ocean olive onion orchard otter oven owl
oyster paddle palm panda paper parrot path peach pear pearl pebble pencil pepper piano pigeon pillow
pine planet plate plum pocket pond poppy potato prairie puffin pumpkin quail quartz rabbit radish
raft rain raven ribbon rice river robin rocket rope rose ruby saddle sage salmon salt sand scarf
shell shrimp silk silver skate snail snow spoon spruce squid star stone storm straw sugar swan
table tea temple thyme tiger tile tomato torch tower train tulip tunnel turtle valley vase velvet
vine violin walnut water whale wheat willow window wolf wool yarn zebra
""".split()
_HELD_OUT_EVERY = 4  # every fourth word is kept for held-out tasks


@dataclasses.dataclass
class _SubGoal:
    """One job: its text, the files it starts from, its check, a command that does it."""

    text: str
    files: dict[str, str]
    check: dict[str, Any]
    command: str


class _Names:
    """Draws words without repetition."""

    def __init__(self, rng: random.Random, words: Sequence[str]):
        self.rng = rng
        self._words = rng.sample(list(words), len(words))

    def word(self) -> str:
        return self._words.pop()

    def file(self) -> str:
        return self.word() + ".txt"

    def text(self, lines: int) -> str:
        return "".join(self.word() + "\n" for _ in range(lines))

    def pick(self, *phrasings: str) -> str:
        return self.rng.choice(phrasings)


def _mkdir(names: _Names) -> _SubGoal:
    name = names.word()
    text = names.pick("Create a folder named {}.", "Make a folder named {}.",
                      "Create a directory named {}.", "Make a new folder called {}.")
    return _SubGoal(text.format(name), {}, {"folders": [name]}, f"mkdir {name}")


def _touch(names: _Names) -> _SubGoal:
    name = names.file()
    text = names.pick("Create an empty file named {}.", "Make an empty file named {}.",
                      "Create a new empty file called {}.")
    return _SubGoal(text.format(name), {}, {"files": {name: ""}}, f"touch {name}")


def _rm(names: _Names) -> _SubGoal:
    name = names.file()
    text = names.pick("Delete the file {}.", "Remove the file {}.", "Delete {}.")
    return _SubGoal(text.format(name), {name: names.text(1)}, {"absent": [name]}, f"rm {name}")


def _mv(names: _Names) -> _SubGoal:
    old, new, content = names.file(), names.file(), names.text(1)
    text = names.pick("Rename {} to {}.", "Rename the file {} to {}.", "Move {} to {}.")
    return _SubGoal(text.format(old, new), {old: content},
                    {"absent": [old], "files": {new: content}}, f"mv {old} {new}")


def _cp(names: _Names) -> _SubGoal:
    old, new, content = names.file(), names.file(), names.text(1)
    text = names.pick("Copy {} to {}.", "Copy the file {} to {}.")
    return _SubGoal(text.format(old, new), {old: content},
                    {"files": {old: content, new: content}}, f"cp {old} {new}")


def _rmdir(names: _Names) -> _SubGoal:
    name = names.word()
    text = names.pick("Remove the empty folder {}.", "Delete the empty folder {}.")
    return _SubGoal(text.format(name), {name + "/": ""}, {"absent": [name]}, f"rmdir {name}")


def _count(names: _Names) -> _SubGoal:
    source, target, lines = names.file(), names.file(), names.rng.randint(2, 6)
    text = names.pick("Count the lines of {} and write the number to {}.",
                      "Write the number of lines in {} to {}.")
    return _SubGoal(text.format(source, target), {source: names.text(lines)},
                    {"first_words": {target: str(lines)}}, f"wc -l < {source} > {target}")


def _sort(names: _Names) -> _SubGoal:
    source, target = names.file(), names.file()
    ordered = sorted(names.word() for _ in range(4))
    shuffled = [ordered[2], ordered[0], ordered[3], ordered[1]]
    text = names.pick("Sort the lines of {} into {}.", "Sort {} and write the result to {}.")
    return _SubGoal(text.format(source, target), {source: "\n".join(shuffled) + "\n"},
                    {"files": {target: "\n".join(ordered) + "\n"}}, f"sort {source} > {target}")


def _append(names: _Names) -> _SubGoal:
    name, content, word = names.file(), names.text(2), names.word()
    text = names.pick("Append the line {} to {}.", "Add the line {} to the end of {}.")
    return _SubGoal(text.format(word, name), {name: content},
                    {"files": {name: content + word + "\n"}}, f"echo {word} >> {name}")


def _edit(names: _Names) -> _SubGoal:
    name, first, old, new = names.file(), names.word(), names.word(), names.word()
    text = names.pick("Replace {} with {} in {}.", "Change the word {} to {} in {}.")
    return _SubGoal(text.format(old, new, name), {name: f"{first}\n{old}\n"},
                    {"files": {name: f"{first}\n{new}\n"}}, f"sed -i s/{old}/{new}/ {name}")


def _combine(names: _Names) -> _SubGoal:
    first, second, target = names.file(), names.file(), names.file()
    one, two = names.text(1), names.text(1)
    text = names.pick("Join {} and {} into {}.", "Combine {} and {} into one file {}.")
    return _SubGoal(text.format(first, second, target), {first: one, second: two},
                    {"files": {target: one + two}}, f"cat {first} {second} > {target}")


def _echo(names: _Names) -> _SubGoal:
    name, word = names.file(), names.word()
    text = names.pick("Write the word {} to {}.", "Write {} into the file {}.")
    return _SubGoal(text.format(word, name), {}, {"files": {name: word + "\n"}},
                    f"echo {word} > {name}")


KINDS: dict[str, Callable[[_Names], _SubGoal]] = {
    "mkdir": _mkdir, "touch": _touch, "rm": _rm, "mv": _mv, "cp": _cp, "rmdir": _rmdir,
    "count": _count, "sort": _sort, "append": _append, "edit": _edit, "combine": _combine,
    "echo": _echo}

DEFAULT_KINDS = ("mkdir", "rm", "mv", "touch", "cp", "rmdir")
"""Kinds that an untrained 135M model does at times, so that there is something to reinforce: with
the reference harness at temperature 0.7 about .9, .6, .7, .1, .1 and .3 (16 tasks each)."""


class ShellJobs:
    """A TaskSource of shell jobs; its tasks are graded by `graders.checks`.

    Args:
      seed: another seed is another sequence; the held-out tasks depend on it, too.
      kinds: keys of KINDS; task i's first sub-goal has kind i modulo their number.
      max_subgoals: most sub-goals of a task, 1 to 4.
      multi_fraction: fraction of tasks with 2 to max_subgoals sub-goals, spread evenly over the
        sequence and over kinds; ignored when max_subgoals is 1.
      held_out: number of held-out tasks.

    Raises:
      ConfigError: unknown kind, or a number out of range.
    """

    def __init__(self, seed: int = 0, kinds: Sequence[str] = DEFAULT_KINDS, max_subgoals: int = 1,
                 multi_fraction: float = 0.0, held_out: int = 48):
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds or len(set(kinds)) != len(kinds):
            raise ConfigError(f"kinds must be different ones of {', '.join(KINDS)}; "
                              f"got {list(kinds)}")
        if not 1 <= max_subgoals <= 4:
            raise ConfigError(f"max_subgoals must be from 1 to 4, got {max_subgoals}")
        if not 0.0 <= multi_fraction <= 1.0:
            raise ConfigError(f"multi_fraction must be in [0, 1], got {multi_fraction}")
        if held_out < 0:
            raise ConfigError(f"held_out must not be negative, got {held_out}")
        self.seed = seed
        self.kinds = tuple(kinds)
        self.max_subgoals = max_subgoals
        self.multi_fraction = multi_fraction if max_subgoals > 1 else 0.0
        self._n_held_out = held_out
        self._held_out_words = _WORDS[::_HELD_OUT_EVERY]
        self._words = [word for index, word in enumerate(_WORDS) if index % _HELD_OUT_EVERY]

    def task(self, index: int) -> Task:
        """The i-th training task, i >= 0. Pure."""
        if index < 0:
            raise ValueError(f"a task index must not be negative, got {index}")
        return self._make("train", index, self._words)

    def held_out(self) -> Sequence[Task]:
        """Tasks with names that never occur in training."""
        return [self._make("test", index, self._held_out_words)
                for index in range(self._n_held_out)]

    grade = staticmethod(checks.grade)

    def _n_subgoals(self, rng: random.Random, index: int) -> int:
        round_, place = divmod(index, len(self.kinds))
        # Each kind's occurrences are multi at a steady rate, kinds out of phase with one another.
        at = round_ * self.multi_fraction + place / len(self.kinds)
        is_multi = math.floor(at + self.multi_fraction + 1e-9) > math.floor(at + 1e-9)
        return rng.randint(2, self.max_subgoals) if is_multi else 1

    def _make(self, split: str, index: int, words: Sequence[str]) -> Task:
        rng = random.Random(f"shell_jobs/{self.seed}/{split}/{index}")
        names = _Names(rng, words)
        first = self.kinds[index % len(self.kinds)]
        n_subgoals = self._n_subgoals(rng, index)
        kinds = [first] + [rng.choice(self.kinds) for _ in range(n_subgoals - 1)]
        subgoals = [KINDS[kind](names) for kind in kinds]
        bystanders = {names.file(): names.text(1) for _ in range(2)}
        files = dict(bystanders)
        checks = []
        for subgoal in subgoals:
            files.update(subgoal.files)
            checks.append({**subgoal.check, "intact": bystanders})
        if n_subgoals == 1:
            instruction = subgoals[0].text
        else:
            instruction = "\n".join(f"{number}. {subgoal.text}"
                                    for number, subgoal in enumerate(subgoals, 1))
        return Task(
            task_id=f"shell-{self.seed}-{split}-{index}", instruction=instruction, files=files,
            kind=first, payload={"checks": checks, "kinds": kinds,
                                 "solution": [subgoal.command for subgoal in subgoals]})


def solution(task: Task) -> tuple[str, ...]:
    """Commands that solve a task, one per sub-goal; for tests and for showing what is wanted."""
    return tuple(task.payload["solution"])
