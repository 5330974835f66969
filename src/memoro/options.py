"""Options: fields of dataclasses that have their type, default and help text in one place.

The library takes them as keyword arguments. The command line makes flags of some of them (`--epochs 5`), and settings
of the others (`--set momentum=0.8`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints


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
    found: dict[str, Option] = {}
    for owner in owners:
        types = get_type_hints(owner)
        for member in fields(owner):
            if "help" not in member.metadata:
                continue
            about = member.metadata
            default = member.default if member.default_factory is MISSING else member.default_factory()
            name = about["name"] or member.name
            kind = about["typed"] or types[member.name]
            one = Option(name, owner, member.name, kind, default, about["help"], about["shown"])
            found.setdefault(name, one)
    return found
