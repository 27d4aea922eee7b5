"""Command lines of all commands and services: wrong words are one line, numbers have bounds."""

from __future__ import annotations

import argparse
import difflib
import math
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from troupe.common.errors import ConfigError


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description that has several, and wraps one that is a single long line."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as one line, like every other error."""

    def __init__(self, *, fields: str = "", takes_fields: bool = False, **options: Any) -> None:
        """Create; option names may not be shortened, for `--section.field` may stand beside them.

        Args:
            fields: where a field of the configuration is to be set, for a command that takes none.
            takes_fields: the command takes fields.
            options: of `argparse.ArgumentParser`.
        """
        self._fields = fields
        self.takes_fields = takes_fields
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise what the command prints on one line and exits with 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].partition("=")[0]
            is_field = "." in word
            near = [] if is_field else self._near(word)
            message = f"unknown argument {word}" + (f"; did you mean {near[0]}?" if near else "")
            if is_field and self._fields:
                message += f": {self._fields}"
        # argparse would print its usage, of dozens of lines, and end the process.
        raise ConfigError(f"{message} (`{self.prog} --help` shows the usage)")

    def _near(self, word: str) -> list[str]:
        """The option that it resembles; the dashes, which all have, are no likeness."""
        names = {name.lstrip("-"): name for name in self._option_string_actions}
        return [names[near] for near in difflib.get_close_matches(word.lstrip("-"), names, n=1)]


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Make the `type` of an option that is a whole number from `low` to `high`."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be a whole number, not {text!r}") from None
        _check_bounds(number, low, high)
        return number

    return convert


def real(low: float, high: float | None = None) -> Callable[[str], float]:
    """Make the `type` of an option that is a finite number from `low` to `high`."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be a number, not {text!r}") from None
        if not math.isfinite(number):
            raise argparse.ArgumentTypeError(f"should be finite, not {text}")
        _check_bounds(number, low, high)
        return number

    return convert


def _check_bounds(number: float, low: float, high: float | None) -> None:
    if number < low or (high is not None and number > high):
        bounds = f"at least {low:g}" if high is None else f"from {low:g} to {high}"
        raise argparse.ArgumentTypeError(f"should be {bounds}, not {number}")
