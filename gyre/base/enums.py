"""The closed sets of gyre's vocabulary, each member with its consequence."""

import enum


class Outcome(enum.StrEnum):
    """How an execution ended. Exactly one per execution (paper: partial scoring).

    The three predicates state the training consequence and are the only place that does.
    """

    COMPLETED = "completed"  # the harness ended by itself
    HARNESS_TIMEOUT = "harness_timeout"  # its time, turn or token budget ran out; workspace kept
    HARNESS_CRASHED = "harness_crashed"  # exit code or signal; workspace kept
    UNGRADED = "ungraded"  # the grader failed and its retries are used up
    OVERALL_TIMEOUT = "overall_timeout"  # the total budget passed before a grade
    INFRA_FAILURE = "infra_failure"  # nothing to grade: the sandbox never came up

    @property
    def is_graded(self) -> bool:
        return self in (Outcome.COMPLETED, Outcome.HARNESS_TIMEOUT, Outcome.HARNESS_CRASHED)

    @property
    def trains_tokens(self) -> bool:
        return self.is_graded


class AgentRole(enum.StrEnum):
    """Who made a call inside an execution. Declaration order is the sampling priority."""

    MAIN = "main"
    MAIN_SUMMARY = "main_summary"
    SUB_AGENT = "sub_agent"
    SUB_AGENT_SUMMARY = "sub_agent_summary"

    @property
    def is_summary(self) -> bool:
        return self in (AgentRole.MAIN_SUMMARY, AgentRole.SUB_AGENT_SUMMARY)


class SegmentKind(enum.StrEnum):
    """What a segment of a trajectory tree is."""

    CONTEXT = "context"  # prompt text
    SAMPLED = "sampled"  # a delivered completion
    SUMMARY = "summary"  # the same, of a call that summarises
    ABANDONED = "abandoned"  # sampled, but the client did not get it, or it cannot be trained


class CellRole(enum.StrEnum):
    """What a cell does now: one of two roles, or a transfer between them."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    TO_TRAIN = "to_train"
    TO_ROLLOUT = "to_rollout"


class FinishReason(enum.StrEnum):
    """Why the engine stopped a call. The engine's word is final; nobody infers it from tokens."""

    STOP = "stop"  # a stop id was sampled (it is the last completion id)
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the client went away


class ScoreStatus(enum.StrEnum):
    """Whether a score is a measurement. A failed grader has a status, never a 0."""

    OK = "ok"
    GRADER_FAILED = "grader_failed"
    OUT_OF_RANGE = "out_of_range"
    PLACEHOLDER = "placeholder"  # 0.0 stands in for an execution with nothing to grade
