"""The parts of `docs/protocol.md` and `docs/security.md` that are made from the code, by `make docs`.

A part stands between two comments with its name. All else on the pages is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from troupe.common.wire import messages
from troupe.common.wire.body import Array, Body, layout_of
from troupe.common.wire.security.claims import CLAIMS

_PART = "<!-- {name}: made by `make docs` -->\n{text}<!-- end -->"


def described(kind: type[Body]) -> str:
    """Who sends a message, and the tables of its fields and of its arrays."""
    sender = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    return "\n\n".join(filter(None, (sender, tables(kind).rstrip()))) + "\n"


def tables(kind: type[Body]) -> str:
    """The tables of the fields and of the arrays of a message."""
    layout, about = layout_of(kind), meanings(kind)
    infos = _fields(kind)
    text = ""
    fields = {"*": layout.rest} if layout.rest else layout.fields
    if fields:
        text += "| field | type | if absent | meaning |\n|---|---|---|---|\n"
        for name, attribute in fields.items():
            for path, info, meaning in _rows(name, infos[attribute], about[attribute]):
                text += f"| `{path}` | {_type(info.type)} | {_absent(info)} | {meaning} |\n"
    arrays = layout.arrays | layout.groups
    if arrays:
        text += "\n" * bool(text) + "| array | type | if absent | meaning |\n|---|---|---|---|\n"
        for name, (attribute, array) in arrays.items():
            group = name in layout.groups
            absent = "there is none" if group else _absent(infos[attribute])
            text += f"| `{name}` | {_array_type(array)} | {absent} | {about[attribute]} |\n"
    return text


def senders() -> str:
    """Which keys permit which message."""
    text = "| message | keys that permit it |\n|---|---|\n"
    for roles in dict.fromkeys(messages.MAY_SEND.values()):
        kinds = ", ".join(kind for kind, may in messages.MAY_SEND.items() if may == roles)
        text += f"| {kinds} | {', '.join(roles) if len(roles) < 5 else 'any'} |\n"
    return text


def claims() -> str:
    """Who may claim what in a message."""
    text = "| claim | roles | rule |\n|---|---|---|\n"
    for name, claim in CLAIMS.items():
        text += f"| `{name}` | {', '.join(claim.roles)} | {claim.rule} |\n"
    return text


def parts() -> dict[str, str]:
    """Every part by its name, with one empty line around it."""
    found = {"who may send what": f"\n{senders()}\n", "who may claim what": f"\n{claims()}\n"}
    return found | {kind.__name__: f"\n{described(kind)}\n" for kind in messages.BODIES}


def renewed(page: str) -> str:
    """The page with its parts as they should be."""
    for name, text in parts().items():
        pattern = re.escape(f"<!-- {name}: made by `make docs` -->\n") + r".*?<!-- end -->"
        part = _PART.format(name=name, text=text).replace("\\", "\\\\")  # a template is what it is
        page = re.sub(pattern, part, page, flags=re.DOTALL)
    return page


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What the docstrings of a struct and its bases say about their attributes."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        listed = re.search(r"Attributes:\n(.*)", base.__doc__ or "", re.DOTALL)
        if issubclass(base, msgspec.Struct) and base is not Body and listed:
            for name, text in re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w|\Z)", listed[1], re.DOTALL | re.M):
                found[name] = " ".join(text.split())
    return found


def _fields(kind: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    return {field.name: field for field in inspect.type_info(kind).fields}  # type: ignore[attr-defined]


def _rows(name: str, field: inspect.Field, meaning: str) -> Iterator[tuple[str, inspect.Field, str]]:
    """A row of a table; for a struct in a message, one for each of its fields."""
    if not isinstance(field.type, inspect.StructType):
        yield name, field, meaning
        return
    about = meanings(field.type.cls)
    for inner, info in _fields(field.type.cls).items():
        yield f"{name}.{inner}", info, about[inner]


def _array_type(array: Array) -> str:
    return array.dtype or "any"


def _absent(field: inspect.Field) -> str:
    if field.required:
        return "refused"
    default: Any = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default in (msgspec.UNSET, msgspec.NODEFAULT):
        return "as it says"
    return "empty" if default in ("", [], {}) else f"{default}".lower()


def _type(info: Any) -> str:
    """A type in words."""
    match info:
        case inspect.Metadata():
            return _type(info.type)
        case inspect.UnionType():
            return " or ".join(filter(None, map(_type, info.types)))
        case inspect.LiteralType():
            return " or ".join(f"`{value}`" for value in info.values) if len(info.values) < 5 else "dtype"
        case inspect.IntType():
            return _range("u64" if info.ge == 0 and info.le is None and info.lt is None else "int", info)
        case inspect.FloatType():
            return _range("float", info)
        case inspect.StrType():
            return f"str of at most {info.max_length:,}" if info.max_length else "str"
        case inspect.ListType():
            most = f" of at most {info.max_length:,}" if info.max_length else ""
            return f"list{most}: {_type(info.item_type)}"
        case inspect.TupleType():
            return f"[{', '.join(_type(each) for each in info.item_types)}]"
        case inspect.StructType(array_like=True):
            return f"[{', '.join(f'{each.name}: {_type(each.type)}' for each in info.fields)}]"
        case inspect.DictType():
            anything = isinstance(info.value_type, inspect.AnyType)
            return "map" if anything else f"map to {_type(info.value_type)}"
    return type(info).__name__.removesuffix("Type").lower().removesuffix("unset")


def _range(word: str, info: Any) -> str:
    low, high = info.ge, info.le if info.le is not None else info.lt
    if word == "u64":
        return word
    if high is None:
        return f"{word} from {_number(low)}" if low is not None else word
    return f"{word} from {_number(low)} {'to' if info.le is not None else 'below'} {_number(high)}"


def _number(value: float) -> str:
    if value < 10_000 or isinstance(value, float):
        return f"{value:g}".replace("e+", "e")
    for offset, suffix in ((0, ""), (1, " - 1")):
        exponent = int(value + offset).bit_length() - 1
        if 1 << exponent == value + offset:
            return f"2^{exponent}{suffix}"
    return f"{value:,.0f}"


def pages() -> Iterator[Path]:
    """The pages that have such parts."""
    docs = Path(__file__).resolve().parent
    yield docs / "protocol.md"
    yield docs / "security.md"


def main() -> int:
    """Write the parts of all pages."""
    for path in pages():
        path.write_text(renewed(path.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
