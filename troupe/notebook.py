"""What a notebook's cells define, as the source of a module that another process can import.

Nothing is pickled. The source of the class or function is copied, and with it that of every function and
class of the notebook that it uses; modules and what comes from modules is imported again; numbers, texts and
lists of them are written as they are now. What cannot be written in this way is refused by its name.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import importlib
import linecache
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from troupe.common.errors import ConfigError

_HEAD = (
    '"""Written by Troupe from the cells of a notebook, for the services of one run."""\n\n'
    "from __future__ import annotations\n"  # a cell may have had it, and its annotations no meaning yet
)
_OTHERWISE = (
    "put it into a module (a .py file beside the notebook), or train with serial=True, in this process"
)


def module_of(env: Callable[..., Any]) -> tuple[str, str]:
    """The name and the source of a module that defines `env`, which the notebook has defined.

    The name follows from the source: the same cells make the same module, and changed ones another.

    Raises:
        ConfigError: its source is nowhere, or it uses what cannot be written as source; names it.
    """
    lines = _Gathered(env).lines
    source = "\n".join([_HEAD, *lines])
    return f"notebook_{hashlib.sha256(source.encode()).hexdigest()[:12]}", source


def inside(module: ModuleType | None, name: str) -> Any:
    """Return what a qualified name means in a module; None where it means nothing."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def file_of(thing: Any) -> str:
    """What Python calls the file or cell that a class or function is written in; "" if it is not said."""
    names = (function.__code__.co_filename for function in _functions(thing))
    return next((name for name in names if name != "<string>"), "")  # what dataclasses, for one, have made


class _Gathered:
    """The lines of the module: definitions stand after what they use."""

    def __init__(self, env: Callable[..., Any]) -> None:
        self._main = vars(sys.modules["__main__"])
        self._root = env.__qualname__
        if inside(sys.modules["__main__"], self._root) is not env:
            raise ConfigError(f"{self._root} has been redefined since env was created: give the newest")
        self._done: set[str] = set()
        self._imports: list[str] = []
        self._definitions: list[str] = []
        self._define(env.__qualname__.partition(".")[0])

    @property
    def lines(self) -> list[str]:
        return [*sorted(self._imports), "", *self._definitions, ""]

    def _define(self, name: str) -> None:
        """Add what a global name of the notebook means, if that is not there yet."""
        if name in self._done or (name not in self._main and hasattr(builtins, name)):
            return
        self._done.add(name)
        if name not in self._main:
            # A name that no cell has defined: it is missing in the notebook too, if it is ever looked up.
            return
        value = self._main[name]
        if isinstance(value, ModuleType):
            self._imports.append(f"import {value.__name__} as {name}")
        elif getattr(value, "__module__", None) == "__main__" and isinstance(value, type | FunctionType):
            self._copy(name, value)
        elif home := _home(value, name):
            self._imports.append(f"from {home[0]} import {home[1]} as {name}")
        elif _is_literal(value):
            self._definitions.append(f"{name} = {value!r}")
        else:
            self._refuse(name, f"a {type(value).__name__}")

    def _copy(self, name: str, value: Any) -> None:
        if value.__name__ != name:  # an alias
            if self._main.get(value.__name__) is not value:
                self._refuse(name, "which was defined by another name, or inside a function")
            self._define(value.__name__)
            self._definitions.append(f"{name} = {value.__name__}")
            return
        source = _source(value)
        if not source:
            self._refuse(name, "whose source is not known (it was not defined in a cell)")
        for used in _globals_of(source):
            self._define(used)
        self._definitions.append(f"\n\n{source}")

    def _refuse(self, name: str, what: str) -> None:
        if name == self._root:
            raise ConfigError(f"services cannot import {name}, {what}: {_OTHERWISE}")
        raise ConfigError(
            f"{self._root} uses {name}, {what}, which cannot be written into a module for the services: "
            f"make it inside {self._root}, {_OTHERWISE}"
        )


def _functions(thing: Any) -> Iterator[FunctionType]:
    """The functions whose code is written where a class or function is."""
    if isinstance(thing, FunctionType):
        yield getattr(thing, "__wrapped__", thing)
    elif isinstance(thing, type):
        for value in vars(thing).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            function = getattr(function, "__wrapped__", function)
            # One that was defined elsewhere may have been put into the class.
            if isinstance(function, FunctionType) and function.__qualname__.startswith(
                f"{thing.__qualname__}."
            ):
                yield function


def _source(thing: Any) -> str:
    """The text of a definition at the top of a cell; empty where it is not to be had."""
    cell = file_of(thing)
    # A class without a method of its own does not say where it is from: the newest cell that defines it.
    cells = [cell] if cell else _cells()
    kinds = ast.ClassDef if isinstance(thing, type) else (ast.FunctionDef, ast.AsyncFunctionDef)
    for each in cells:
        text = "".join(linecache.getlines(each))
        with contextlib.suppress(SyntaxError):  # a cell with a magic, such as %time, has been rewritten
            found = [
                node
                for node in ast.parse(text).body
                if isinstance(node, kinds) and node.name == thing.__name__
            ]
            if found:
                node = found[-1]
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return textwrap.dedent("\n".join(text.split("\n")[first - 1 : node.end_lineno]))
    return ""


def _cells() -> list[str]:
    """What Python calls the cells that have been run, the newest first: text that is in no file."""
    entries = linecache.cache.items()
    return [name for name, entry in reversed(entries) if len(entry) == 4 and entry[1] is None]


def _globals_of(source: str) -> list[str]:
    """The global names that a definition looks up, in a fixed order; its own is not among them."""
    found: set[str] = set()
    tables = [symtable.symtable(source, "<cell>", "exec")]
    defined = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned()}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            top = table.get_type() == "module"
            if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
                found.add(symbol.get_name())
    return sorted(found - defined)


def _home(value: Any, name: str) -> tuple[str, str] | None:
    """The module and the name by which something can be imported."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == "__main__":
        return None
    for attribute in (getattr(value, "__qualname__", None), getattr(value, "__name__", None), name):
        if isinstance(attribute, str) and attribute.isidentifier():
            with contextlib.suppress(ImportError, AttributeError):
                if getattr(importlib.import_module(module), attribute) is value:
                    return module, attribute
    return None


def _is_literal(value: Any) -> bool:
    """Whether `repr` gives the same value again."""
    try:
        return type(ast.literal_eval(repr(value))) is type(value) and ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
