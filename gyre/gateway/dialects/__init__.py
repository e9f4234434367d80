"""Wire dialects: pure translators around one conversation type. Adding one is a file and its line below."""

from gyre.gateway.dialects.anthropic import AnthropicMessages
from gyre.gateway.dialects.base import (
    Conversation,
    Dialect,
    Reply,
    ReplyHead,
    ReplyStream,
    RequestError,
)
from gyre.gateway.dialects.google import GoogleGenerate
from gyre.gateway.dialects.openai_chat import OpenAIChat
from gyre.gateway.dialects.openai_responses import OpenAIResponses

OPENAI_CHAT = OpenAIChat()
ANTHROPIC = AnthropicMessages()
GOOGLE = GoogleGenerate()
DIALECTS: tuple[Dialect, ...] = (OPENAI_CHAT, OpenAIResponses(), ANTHROPIC, GOOGLE)

__all__ = ["ANTHROPIC", "DIALECTS", "GOOGLE", "OPENAI_CHAT", "Conversation", "Dialect", "Reply", "ReplyHead",
           "ReplyStream", "RequestError"]
