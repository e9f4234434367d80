"""Identifiers: secret keys and run-unique call ids."""

import secrets


def new_key() -> str:
    """A secret key of one execution: 128 random bits as `gk-` + 32 hex digits."""
    return "gk-" + secrets.token_hex(16)


def new_call_id() -> str:
    """A tool-call id: at most 40 characters of [A-Za-z0-9_-], unique over the run."""
    return "call_" + secrets.token_hex(12)


def new_request_id() -> str:
    """The id of one model call."""
    return "req-" + secrets.token_hex(12)


def execution_id(group_index: int, member: int, attempt: int = 0) -> str:
    """Stable id of an execution: `g000012-3`, or `g000012-3.r1` for its first restart."""
    base = f"g{group_index:06d}-{member}"
    return base if attempt == 0 else f"{base}.r{attempt}"
