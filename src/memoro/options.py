"""Arguments that take one value or several, and options: dataclass fields with their type, default and help text.

The library takes options as keyword arguments. The command line makes flags of some of them (`--epochs 5`), and
settings of the others (`--set momentum=0.8`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def several(values: T | Iterable[T]) -> tuple[T, ...]:
    """The values as a tuple. Text, and what cannot be iterated over, is a single value."""
    single: Any = values
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (single,)


def plain_int(value: Any) -> Any:
    """A whole number of any type, such as NumPy's, as an int; anything else as it is."""
    return int(value) if isinstance(value, Integral) else value


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    name: str | None = None,
    shown: str | None = None,
    typed: Any = None,
) -> Any:
    """A field of a dataclass that is an option.

    `name` is the option's name if that of the field says too little without its class, `shown` what the default is if
    its value does not say so, and `typed` the type of what a command line can say, if the field takes more than that.
    """
    metadata = {"help": help, "name": name, "shown": shown, "typed": typed}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """An option as users see it, and the field that it sets."""

    name: str
    owner: type
    field: str
    type: Any
    default: Any
    help: str
    shown: str | None


def read_options(*owners: type) -> dict[str, Option]:
    """The options of some dataclasses by name. Of two with one name, the first counts."""
    options: dict[str, Option] = {}
    for owner in owners:
        types = get_type_hints(owner)
        for member in fields(owner):
            if "help" not in member.metadata:
                continue
            about = member.metadata
            default = member.default if member.default_factory is MISSING else member.default_factory()
            name, kind = about["name"] or member.name, about["typed"] or types[member.name]
            options.setdefault(name, Option(name, owner, member.name, kind, default, about["help"], about["shown"]))
    return options
