"""The tables of the trajectory store and how calls and results become rows.

Arrays are little-endian blobs, int32 or float32; enums are their values; lists are JSON.
"""

from __future__ import annotations

import json
import math
import sqlite3

import numpy as np

from gyre.base.enums import AgentRole, FinishReason, Outcome, ScoreStatus
from gyre.base.protocols import ExecutionResult, SamplingParams, Score
from gyre.trajectory.record import CallRecord

APPLICATION_ID = 0x67797265  # "gyre"
SCHEMA_VERSION = 1
SCHEMA = (
    """CREATE TABLE groups(
         group_index INTEGER PRIMARY KEY, task_id TEXT NOT NULL, kind TEXT NOT NULL,
         version_dispatched INTEGER NOT NULL, attempt INTEGER NOT NULL, dispatched_s REAL NOT NULL,
         finished_s REAL, finished_order INTEGER UNIQUE, consumed_step INTEGER, skipped TEXT)""",
    """CREATE TABLE executions(
         execution_id TEXT PRIMARY KEY,
         group_index INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE, member INTEGER NOT NULL,
         outcome TEXT NOT NULL, score REAL, score_status TEXT NOT NULL, detail TEXT NOT NULL,
         started_s REAL NOT NULL, finished_s REAL NOT NULL, exit_code INTEGER,
         log_tail TEXT NOT NULL, UNIQUE(group_index, member))""",
    """CREATE TABLE calls(
         call_id TEXT PRIMARY KEY,
         execution_id TEXT NOT NULL REFERENCES executions ON DELETE CASCADE,
         ordinal INTEGER NOT NULL, agent_role TEXT NOT NULL, prefix_call TEXT,
         suffix_ids BLOB NOT NULL, completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
         versions BLOB NOT NULL, finish TEXT NOT NULL, max_tokens INTEGER NOT NULL,
         temperature REAL NOT NULL, seed INTEGER NOT NULL, stop_ids TEXT NOT NULL,
         delivered INTEGER NOT NULL, started_s REAL NOT NULL, finished_s REAL NOT NULL,
         metadata TEXT NOT NULL, UNIQUE(execution_id, ordinal))""",
)


def marks(n: int) -> str:
    """Placeholders of n columns."""
    return ", ".join("?" * n)


def call_row(record: CallRecord, execution_id: str, ordinal: int) -> tuple:
    """The columns of `calls`. Raises ValueError: the call is another execution's."""
    if record.execution_id != execution_id:
        raise ValueError(f"call {record.call_id!r} is of execution {record.execution_id!r}, "
                         f"not {execution_id!r}")
    s = record.sampling
    return (record.call_id, execution_id, ordinal, record.agent_role.value, record.prefix_call,
            np.asarray(record.suffix_ids, "<i4").tobytes(),
            np.asarray(record.completion_ids, "<i4").tobytes(),
            np.asarray(record.logprobs, "<f4").tobytes(),
            np.asarray(record.versions, "<i4").tobytes(), record.finish.value, s.max_tokens,
            s.temperature, s.seed, json.dumps(list(s.stop_ids)), int(record.delivered),
            record.started_s, record.finished_s, json.dumps(dict(record.metadata)))


def read_record(row: sqlite3.Row) -> CallRecord:
    """The call in a row of `calls`."""
    def ints(name: str) -> np.ndarray:
        return np.frombuffer(row[name], "<i4").astype(np.int32)

    return CallRecord(
        call_id=row["call_id"], execution_id=row["execution_id"],
        agent_role=AgentRole(row["agent_role"]), prefix_call=row["prefix_call"],
        suffix_ids=ints("suffix_ids"), completion_ids=ints("completion_ids"),
        logprobs=np.frombuffer(row["logprobs"], "<f4").astype(np.float32),
        versions=ints("versions"), finish=FinishReason(row["finish"]),
        sampling=SamplingParams(row["max_tokens"], row["temperature"], row["seed"],
                                tuple(json.loads(row["stop_ids"]))),
        delivered=bool(row["delivered"]), started_s=row["started_s"], finished_s=row["finished_s"],
        metadata=json.loads(row["metadata"]))


def read_result(row: sqlite3.Row, task_id: str) -> ExecutionResult:
    """The result in a row of `executions`; NULL is a score of NaN."""
    value = math.nan if row["score"] is None else row["score"]
    return ExecutionResult(
        execution_id=row["execution_id"], task_id=task_id, outcome=Outcome(row["outcome"]),
        score=Score(value, ScoreStatus(row["score_status"]), row["detail"]),
        started_s=row["started_s"], finished_s=row["finished_s"], exit_code=row["exit_code"],
        log_tail=row["log_tail"])
