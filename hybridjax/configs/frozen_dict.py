"""JSON objects that a frozen, hashable configuration can hold."""

from collections.abc import Mapping
from typing import Any


class FrozenDict(dict[str, Any]):
    """A dict of JSON values, lists turned into tuples, that is hashable because it cannot change."""

    def __init__(self, values: Any = ()):
        super().__init__({name: _frozen(value) for name, value in dict(values).items()})

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __deepcopy__(self, memo: Any) -> "FrozenDict":
        return self

    def __reduce__(self) -> Any:
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a FrozenDict cannot be changed")

    __setitem__ = __delitem__ = __ior__ = _refuse  # pyright: ignore[reportAssignmentType]
    clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict(value)
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
