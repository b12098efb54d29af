"""A setting that may differ from model to model: ``cost,modelA=sticky``. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class PerModel(Generic[Value]):
    """``default`` for every model that is not ``named``; ``name`` stands for all its pools, ``name#pool`` for one."""

    default: Value
    named: Mapping[str, Value] = field(default_factory=dict)

    def of(self, tag: str) -> Value:
        """The value for a model tag: its own, else its name's, else the default."""
        for name in (tag, tag.partition("#")[0]):
            if name in self.named:
                return self.named[name]
        return self.default

    def strangers(self, tags: Sequence[str]) -> list[str]:
        """Names that are none of these models: typing errors."""
        return sorted(self.named.keys() - {*tags, *(tag.partition("#")[0] for tag in tags)})

    def values(self) -> list[Value]:
        return [self.default, *self.named.values()]

    def read(self, text: str, cast: Callable[[str], Value]) -> PerModel[Value]:
        """What ``text`` says, the rest as here. Raises ValueError; whatever ``cast`` raises."""
        default, named, seen = self.default, dict(self.named), set[str]()
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, value = (one.strip() for one in part.rpartition("="))
            if name in seen or (equals and not name):
                raise ValueError(f"{part!r}: a model, or the default, twice or without a name")
            seen.add(name)
            if name:
                named[name] = cast(value)
            else:
                default = cast(value)
        return PerModel(default, named)

    def __str__(self) -> str:
        """As it is written in the environment."""
        return ",".join([str(self.default), *(f"{name}={value}" for name, value in self.named.items())])
