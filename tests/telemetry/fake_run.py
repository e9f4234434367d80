"""A made-up run folder with every file that the report reads; seeded, no clock, no jax."""

from __future__ import annotations

import math
import pathlib
import random

from gyre.telemetry import jsonl
from gyre.telemetry.run_folder import RunFolder

START_S = 1_800_000_000.0
CONFIG = {
    "seed": 0, "steps": 16, "scheduler": "elastic", "groups_per_step": 6, "group_size": 8, "mu": 1,
    "schedulers": {"elastic": {"phi": 1.0}}, "cells": {"count": 3, "shape": [1, 1]},
    "model": {"name": "smollm2-135m-instruct", "chat_template": "chatml"}, "algorithm": {"name": "grpo"}}


def metrics_row(step, rng, time_s=START_S, steps=16):
    """A step's row; the reward rises from 0.3 to 0.7."""
    reward = 0.3 + 0.42 * (1 - math.exp(-3 * step / steps)) + rng.gauss(0, 0.02)
    timeouts = rng.randrange(3)
    return {
        "step": step, "version": step, "wall_s": 12 + 4 * rng.random(), "time_s": time_s,
        "reward_mean": reward, "reward_std": 0.3 - 0.1 * step / steps, "executions": 48,
        "outcomes": {"completed": 47 - timeouts, "harness_timeout": timeouts, "ungraded": 1},
        "loss": rng.gauss(0, 0.1), "grad_norm": 0.8 + 0.3 * rng.random(),
        "entropy": 0.9 - 0.3 * step / steps, "staleness_mean": min(step - 1, 1) * 0.8,
        "staleness_max": min(step - 1, 1), "mismatch_kl": 0.002 * rng.random(),
        "tokens_trained": 1500 + rng.randrange(300), "tokens_unique": 4100 + rng.randrange(400),
        "tokens_linearized": 11000 + rng.randrange(900), "tokens_sampled": 1600,
        "clip_fraction": 0.01,
        "tokens_per_s": 210 + 40 * rng.random(), "rollout_idle_fraction": 0.2 + 0.2 * rng.random(),
        "train_idle_fraction": 0.1 + 0.1 * rng.random(), "groups_skipped": 0, "waterlevel": 20,
        "roles": "TRR", "learning_rate": 5e-5}


def events(steps, rng, step_s=14.0, start_s=START_S, cells=3):
    """The event log of `steps` bursts, in which the cells go to train one after another."""
    out, now, w = [], start_s, 0

    def say(kind, at, **fields):
        out.append({"time_s": round(at, 4), "kind": kind, **fields})

    say("run_start", now, cells=[{"cell": i, "devices": [f"cpu:{i}"], "capacity": 32,
                                  "standalone": False} for i in range(cells)], resumed_step=0)
    for cell in range(cells):
        say("role", now, cell=cell, role="rollout")
    capacity = 32 * cells
    for step in range(1, steps + 1):
        w += 48
        say("waterlevel", now, w=w, capacity=capacity, dispatched=48 * step, finished=0)
        leave = {cell: now + step_s * (0.3 + 0.25 * cell) for cell in range(cells - 1)}
        back = now + step_s * (0.94 + 0.04 * rng.random())
        for i in range(40):
            at = now + step_s * (i + 1) / 42
            w = max(w - (1 + (i % 5 == 0)), 0)
            capacity = 32 * (cells - sum(at > t for t in leave.values()))
            say("waterlevel", at, w=w, capacity=capacity, dispatched=48 * step, finished=0)
        for cell, at in leave.items():
            say("role", at, cell=cell, role="to_train")
            for k in range(rng.randrange(4)):
                say("move_call", at + 0.05, call=f"c{step}-{k}", execution=f"g{step:06d}-{k}",
                    source=cell, destination=cells - 1, tokens=rng.randrange(40), kv=True)
            say("role", at + 0.4, cell=cell, role="train")
            say("decide", at, view={"cells": []}, actions=[])
        capacity = 32 * cells
        say("step", back, step=step, version=step)
        for cell in leave:
            say("role", back + 0.1, cell=cell, role="to_rollout")
            say("role", back + 0.5, cell=cell, role="rollout")
        now += step_s * (1 + 0.04)
    say("stop", now, reason="finished")
    return sorted(out, key=lambda e: e["time_s"])


def example_tree(text=True):
    """A main agent with a compaction, an abandoned call and a sub-agent: four paths."""
    def seg(parent, tokens, role="main", call=None, trainable=None, words="some words"):
        return {"parent": parent, "tokens": tokens, "agent_role": role, "call": call,
                "trainable": call is not None if trainable is None else trainable,
                "versions": None if call is None else [3, 4],
                "text": words if text else None}
    return {
        "execution": "g000012-3", "task": "shell_jobs/000012", "outcome": "completed",
        "score": 0.75, "calls": 7, "wall_s": 8.4, "tokens_linearized": 2210, "segments": [
            seg(-1, 120, words="<|im_start|>system\nYou work in a shell. <b>Answer</b> with bash."),
            seg(0, 60, words="<|im_start|>user\nMove notes.txt into archive & count the lines."),
            seg(1, 42, call=1, words="```bash\nmkdir -p archive && mv notes.txt archive/\n```"),
            seg(2, 30, words="<|im_start|>user\nexit code 0"),
            seg(3, 38, call=2, words="```bash\nwc -l archive/notes.txt > count.txt\n```"),
            seg(4, 24),
            seg(5, 40, call=3), seg(4, 35, "main_summary"), seg(7, 58, "main_summary", 4),
            seg(1, 33, call=5, trainable=False, words="an answer that the client abandoned"),
            seg(0, 90, "sub_agent", words="You are a sub-agent. Sort the names."),
            seg(10, 45, "sub_agent", 6, words="```bash\nsort names.txt -o names.txt\n```"),
            seg(11, 20, "sub_agent"), seg(12, 36, "sub_agent", 7)]}


def make(path: pathlib.Path, steps: int = 16, seed: int = 0) -> pathlib.Path:
    """Writes a finished run's folder and returns it."""
    rng = random.Random(seed)
    with RunFolder.open(path, {**CONFIG, "steps": steps}) as folder:
        folder.record_session(devices=["cpu:0", "cpu:1", "cpu:2"])
        rows = [metrics_row(s, rng, steps=steps) for s in range(1, steps + 1)]
        folder.metrics_path.write_text("".join(map(jsonl.line, rows)))
        folder.events_path.write_text("".join(map(jsonl.line, events(steps, rng))))
        for step, score in ((0, 0.31), (steps, 0.68)):
            folder.append_evaluation({
                "step": step, "version": step, "mean_score": score, "pass_rate": score - 0.1,
                "n": 48,
                "by_kind": {"rm": score - 0.05, "mv": score, "mkdir": score + 0.1}, "wall_s": 5.0})
    return path
