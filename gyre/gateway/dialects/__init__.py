"""Wire dialects. A dialect is a module of pure functions; this table says which path speaks which.

A path under the base URL that is not in the table is answered with 404 in OpenAI's error shape.
"""

from types import ModuleType

from gyre.gateway.dialects import openai_chat
from gyre.gateway.dialects.base import Conversation, Reply, RequestError

DIALECTS: dict[str, ModuleType] = {"/v1/chat/completions": openai_chat}

__all__ = ["DIALECTS", "Conversation", "Reply", "RequestError", "openai_chat"]
