"""What one message type carries, as a struct: the only definition of its fields and arrays.

The annotations say the type and the bounds of each, its default what its absence means, and the docstring
what it is for. Decoding checks against them, and the tables of `docs/protocol.md` are made of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from troupe.common.wire.codec import DTYPES, Message, WireError

FIELD = "FIELD"
"""Stands in the name of a group of arrays for the part that differs."""


@dataclass(frozen=True, slots=True)
class Array:
    """What an array has to be.

    Attributes:
        dtype: a name in `DTYPES`; empty for any.
        ndim: number of dimensions; -1 for any.
    """

    dtype: str = ""
    ndim: int = -1

    def check(self, kind: str, name: str, array: np.ndarray) -> None:
        """Raise WireError for any other array, called `name` in a message of type `kind`."""
        if self.dtype and array.dtype != DTYPES[self.dtype]:
            raise WireError("bad_field", f"{kind}.{name}: expected `{self.dtype}`, got `{array.dtype}`")
        if self.ndim not in (-1, array.ndim):
            raise WireError("bad_field", f"{kind}.{name}: expected {self.ndim} dimensions, got {array.ndim}")


@dataclass
class Layout:
    """Attributes of a struct by the names that they have on the wire, own ones before those of its bases.

    Attributes:
        fields: those in the header.
        arrays: single ones, and what they have to be.
        groups: dicts of arrays.
        rest: the attribute that takes all fields, whatever they are; empty for none.
    """

    fields: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, tuple[str, Array]] = field(default_factory=dict)
    groups: dict[str, tuple[str, Array]] = field(default_factory=dict)
    rest: str = ""

    def sort(self, kind: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Check the arrays of a message, and put those of a group together. Unknown ones are left out."""
        found: dict[str, Any] = {group: {} for group in self.groups}
        for name, array in arrays.items():
            if name in self.arrays:
                self.arrays[name][1].check(kind, name, array)
                found[name] = array
                continue
            for group, (_, wanted) in self.groups.items():
                # Unknown arrays are ignored, as unknown fields are: a later version may send more, and old
                # servers live on.
                if name.startswith(prefix := _prefix(group)):
                    wanted.check(kind, name, array)
                    found[group][name[len(prefix) :]] = array
                    break
        return found


class Body(msgspec.Struct):
    """The fields and arrays of one message.

    Attributes that are `UNSET` are absent on the wire. A group of arrays is a dict by the part of the name
    that `FIELD` stands for. Where `*` is the name of an attribute, it takes whatever there is.
    """

    TYPE: ClassVar[str] = ""

    @classmethod
    def of(cls, message: Message) -> Self:
        """Read a message of this type, whose unknown fields and arrays are ignored.

        Raises WireError, with the path of what is wrong.
        """
        layout = layout_of(cls)
        if layout.rest:
            return cls(**{layout.rest: message.fields})
        values = {name: message.fields[name] for name in layout.fields if name in message.fields}
        if message.arrays or layout.groups:
            values |= layout.sort(cls.TYPE, message.arrays)
        try:
            # Only known names are converted: a header may hold thousands of others, each of which would be
            # looked at.
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise WireError("bad_field", _sentence(cls.TYPE, str(error))) from None

    def message(self, request_id: int = 0) -> Message:
        """The message that says this. Its arrays are these, not copies."""
        layout = layout_of(type(self))
        if layout.rest:
            return Message(self.TYPE, getattr(self, layout.rest), {}, request_id)
        fields, arrays = {}, {}
        for name, attribute in layout.fields.items():
            if (value := getattr(self, attribute)) is not msgspec.UNSET:
                fields[name] = value
        for name, (attribute, _) in layout.arrays.items():
            if (array := getattr(self, attribute)) is not msgspec.UNSET:
                arrays[name] = array
        for group, (attribute, _) in layout.groups.items():
            arrays |= {_prefix(group) + name: array for name, array in getattr(self, attribute).items()}
        return Message(self.TYPE, fields, arrays, request_id)


# Reflection over annotations takes far longer than decoding a message.
@functools.cache
def layout_of(kind: type[Body]) -> Layout:
    """Where the fields and arrays of a struct stand."""
    layout = Layout()
    hints = get_type_hints(kind, include_extras=True)
    for attribute, name in names_of(kind).items():
        array = next((each for each in _annotations(hints[attribute]) if isinstance(each, Array)), None)
        if array is None and name == "*":
            layout.rest = attribute
        elif array is None:
            layout.fields[name] = attribute
        elif name == "*" or name.endswith(FIELD):
            layout.groups[name] = attribute, array
        else:
            layout.arrays[name] = attribute, array
    return layout


def names_of(kind: type[Body]) -> dict[str, str]:
    """The names on the wire of the attributes of a struct, in their order."""
    names = {each.name: each.encode_name for each in msgspec.structs.fields(kind)}
    # A struct's bases come first in msgspec; in the document what is special about a message should.
    own_first = [name for base in kind.__mro__ if issubclass(base, Body) for name in base.__annotations__]
    return {name: names[name] for name in dict.fromkeys(own_first) if name in names}


def _prefix(group: str) -> str:
    """What the names of a group's arrays begin with."""
    return group.removesuffix(FIELD).removesuffix("*")


def _annotations(hint: Any) -> Iterator[Any]:
    """Everything that `Annotated` adds anywhere in a type."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    for inner in get_args(hint):
        yield from _annotations(inner)


def _sentence(kind: str, text: str) -> str:
    """An error of msgspec with the path in front: `INSERT.fields[0][1]: expected ...`."""
    match = re.fullmatch(r"(.*?)(?: - at `\$(.*)`)?", text, re.DOTALL)
    assert match is not None
    what, path = match[1], match[2] or ""
    return f"{kind}{path[:200]}: {what[:1].lower()}{what[1:]}"
