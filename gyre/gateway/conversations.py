"""All conversations of one execution as one prefix tree of messages.

Forks, interleaved sub-agents and summaries over cut histories are branches; another tool list is another
root. Messages are compared by value along the path, never hashed, so that a request costs no more than
one comparison of its text, and mostly of its objects' identities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gyre.base.protocols import Message, Tools
from gyre.gateway.history import Entry, Turn


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
      children: the most recently used first.
    """

    parent: Node | None
    message: Message | None = None
    shown: Message | None = None
    depth: int = 0
    turns: list[Turn] = dataclasses.field(default_factory=list)
    asked: list[str] = dataclasses.field(default_factory=list)
    children: list[Node] = dataclasses.field(default_factory=list)

    def child(self, message: Message) -> Node | None:
        """The child with this identity, which moves to the front."""
        for i, node in enumerate(self.children):
            if node.message is message or node.message == message:
                if i:
                    self.children.insert(0, self.children.pop(i))
                return node
        return None

    def extend(self, entry: Entry) -> Node:
        """The child for this entry, made where there is none."""
        node = self.child(entry.identity)
        if node is None:
            node = Node(self, entry.identity, entry.shown, self.depth + 1)
            self.children.insert(0, node)
        return node

    def path(self) -> list[Node]:
        """The nodes from the first message to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Conversations:
    """The tree. Roots are tool lists."""

    def __init__(self):
        self._roots: list[tuple[tuple, Node]] = []

    def insert(self, tools: Tools, entries: Sequence[Entry]) -> Node:
        """The node of a history, with nodes for all of its messages."""
        node = self._root(tuple(tools))
        for entry in entries:
            children, message = node.children, entry.identity
            if children and (children[0].message is message or children[0].message == message):
                node = children[0]  # as nearly always
            else:
                node = node.extend(entry)
        return node

    def _root(self, tools: tuple) -> Node:
        for i, (known, node) in enumerate(self._roots):
            if known == tools:
                if i:
                    self._roots.insert(0, self._roots.pop(i))
                return node
        node = Node(None)
        self._roots.insert(0, (tools, node))
        return node
