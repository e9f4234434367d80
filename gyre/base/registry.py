"""A registry that is the only authority on names: duplicates and unknown names raise."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from gyre.base.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to a thing of one kind.

    Args:
      kind: what the things are, for error messages ("algorithm", "policy").
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds a thing under `name`. Raises ConfigError on a duplicate."""

        def add(item: T) -> T:
            if name in self._items:
                raise ConfigError(f"{self.kind} {name!r} is registered twice")
            self._items[name] = item
            return item

        return add

    def get(self, name: str) -> T:
        """Returns the thing called `name`. Raises ConfigError that lists what exists."""
        if name not in self._items:
            raise ConfigError(
                f"unknown {self.kind} {name!r}; available: {', '.join(sorted(self._items))}")
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))

    def __len__(self) -> int:
        return len(self._items)
