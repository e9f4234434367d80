"""All conversations of one execution as one prefix tree of messages.

Forks, interleaved sub-agents and summaries over cut histories are branches; another tool list is another
root. Messages are compared by value along the path, never hashed as a whole, so that a request costs no more
than one comparison of its text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gyre.base.protocols import Message, Tools
from gyre.gateway.history import Entry, Turn

_SKETCHED_CHARS = 64


@dataclasses.dataclass(eq=False)
class Node:
    """A message behind those of its ancestors.

    Attributes:
      parent: None for the node of a tool list, which holds no message.
      message: its identity; None at a root.
      shown: the message with what its identity leaves out.
      depth: messages up to and with this one.
      turns: the sampled turns that end here, in the order they were answered.
      asked: the calls whose request ends here, in order.
      latest: the child that was used last.
      children: by a sketch of their messages, so that the cost does not grow with their number.
    """

    parent: Node | None
    message: Message | None = None
    shown: Message | None = None
    depth: int = 0
    turns: list[Turn] = dataclasses.field(default_factory=list)
    asked: list[str] = dataclasses.field(default_factory=list)
    latest: Node | None = None
    children: dict[tuple, list[Node]] = dataclasses.field(default_factory=dict)

    def child(self, message: Message) -> Node | None:
        """The child with this identity; it becomes the latest."""
        for node in self.children.get(_sketch(message), ()):
            if node.message == message:
                self.latest = node
                return node
        return None

    def extend(self, entry: Entry, keep: bool = True) -> Node:
        """The child for this entry, made where there is none; with `keep`, it is found from then on."""
        node = self.child(entry.identity)
        if node is None:
            node = Node(self, entry.identity, entry.shown, self.depth + 1)
            if keep:
                self.children.setdefault(_sketch(entry.identity), []).append(node)
                self.latest = node
        return node

    def path(self) -> list[Node]:
        """The nodes from the first message to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def _sketch(message: Message) -> tuple:
    """Equal for equal messages, and cheap however long they are."""
    text, calls = message.content, message.tool_calls
    return (message.role, len(text), text[:_SKETCHED_CHARS], text[-_SKETCHED_CHARS:], message.tool_call_id,
            calls[0].call_id if calls else "")


class Conversations:
    """The tree. Roots are tool lists."""

    def __init__(self):
        self._roots: list[tuple[tuple, Node]] = []

    def insert(self, tools: Tools, entries: Sequence[Entry], keep: bool = True) -> Node:
        """The node of a history. With `keep`, what is new in it stays in the tree."""
        node = self._root(tuple(tools), keep)
        for entry in entries:
            latest, message = node.latest, entry.identity
            if latest is not None and (latest.message is message or latest.message == message):
                node = latest  # as nearly always
            else:
                node = node.extend(entry, keep)
        return node

    def _root(self, tools: tuple, keep: bool) -> Node:
        for i, (known, node) in enumerate(self._roots):
            if known == tools:
                if i:
                    self._roots.insert(0, self._roots.pop(i))
                return node
        node = Node(None)
        if keep:
            self._roots.insert(0, (tools, node))
        return node
