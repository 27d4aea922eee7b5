"""An environment that a program or a notebook has at hand, brought to where the services find it.

The services are processes of their own, and nothing is pickled: they import what makes the environment. So a
class or function has to be in a module. One of the program itself is in the program's file; one of a notebook
is written into a module, with what it uses (`troupe.notebook`).
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from troupe.common.envs import in_process
from troupe.common.errors import ConfigError
from troupe.common.runtime.files import CONFIG_FILE, SOURCE_FOLDER
from troupe.notebook import file_of, inside, module_of


@dataclass(frozen=True)
class Brought:
    """How other processes make an environment.

    Attributes:
        id: `env.id`.
        folder: where Python has to look for its module; None where it looks there anyway.
        module: of a notebook, its name, which follows from the source.
        source: of that module.
        beside: folders of what that module imports, of modules that are not installed.
    """

    id: str
    folder: Path | None = None
    module: str = ""
    source: str = ""
    beside: tuple[Path, ...] = ()

    @contextlib.contextmanager
    def kept_if_begun(self, run_dir: Path) -> Iterator[None]:
        """Remove the module from the run directory again, and that, where this block fails without a run."""
        try:
            yield
        except BaseException:
            folder = run_dir.absolute() / SOURCE_FOLDER
            if folder == self.folder and not (run_dir / CONFIG_FILE).exists():
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # it has something else in it
                    run_dir.rmdir()
            raise

    def reachable_from(self, run_dir: Path) -> Brought:
        """Write the module of a notebook into the run directory, where there is one to write."""
        if not self.source:
            return self
        folder = run_dir.absolute() / SOURCE_FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.module}.py").write_text(self.source, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write into {folder}: {error.strerror}") from error
        return Brought(self.id, folder, beside=self.beside)

    def variables(self) -> dict[str, str]:
        """The environment variables of a process that imports the module, and others that this one would."""
        paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *self._folders]
        # An algorithm, a wrapper or an environment may be named in words, or by a file of configuration.
        known = {os.path.abspath(path) for path in paths}
        paths += [path for path in _program_folders() if path not in known]
        return {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}

    @property
    def _folders(self) -> list[str]:
        return [] if self.folder is None else [str(self.folder), *map(str, self.beside)]

    @contextlib.contextmanager
    def findable(self) -> Iterator[None]:
        """Have this process and those that it starts find the module, until the block ends."""
        former, folders = os.environ.get("PYTHONPATH"), self._folders
        os.environ.update(self.variables())
        added = [folder for folder in folders if folder not in sys.path]  # what is there keeps its place
        sys.path += added
        importlib.invalidate_caches()  # the module may have been written a moment ago
        try:
            yield
        finally:
            for folder in added:
                sys.path.remove(folder)
            if former is None:
                os.environ.pop("PYTHONPATH", None)
            else:
                os.environ["PYTHONPATH"] = former


def _program_folders() -> list[str]:
    """Where this program finds modules of its own: what precedes installed packages in `sys.path`."""
    standard, own = os.path.dirname(os.__file__), []
    for folder in map(os.path.abspath, sys.path):  # a notebook's own, "", comes after the standard library
        if os.path.basename(folder) in ("site-packages", "dist-packages"):
            break
        if not f"{folder}/".startswith(f"{standard}/") and os.path.isdir(folder):
            own.append(folder)
    return list(dict.fromkeys(own))


def bring(env: str | Callable[..., Any], *, here: bool = False) -> Brought:
    """Say how services make an environment.

    Args:
        env: an id, such as `gym:CartPole-v1`; or a class or function that returns a Gymnasium environment.
        here: it is made by this process only, so that anything that can be called will do.

    Raises:
        ConfigError: no other process could make it; says what to do.
    """
    if isinstance(env, str):
        return Brought(env)
    name = getattr(env, "__qualname__", "")
    if not callable(env) or not name:
        what = "an environment that has been made already" if hasattr(env, "reset") else repr(type(env))
        raise ConfigError(
            f"env should be an id, or a class or function that makes an environment, not {what}: "
            "every service makes copies of its own"
        )
    if here:
        # Of a dot, such as in `make.<locals>.Maze`, Gymnasium would want another meaning.
        return Brought(in_process.hold(getattr(env, "__name__", "environment").strip("<>"), env))
    if "<" in name:
        raise ConfigError(
            f"{name.replace('<locals>.', '')} is defined inside a function, where no service can import it: "
            "define it at the top of a module, or train with serial=True, in this process"
        )
    if env.__module__ != "__main__":
        return _of_module(env, name)
    program = _program()
    if program is None or not _is_of_file(env, program):
        module, source = module_of(env)
        return Brought(f"{module}:{name}", module=module, source=source, beside=_beside(source))
    return _of_program(program, name)


def _of_module(env: Any, name: str) -> Brought:
    module = sys.modules.get(env.__module__)
    if module is None or inside(module, name) is not env:
        raise ConfigError(
            f"{env.__module__} now has another {name} than the env that was given: import it again"
        )
    return Brought(f"{env.__module__}:{name}", _root(module))


def _root(module: ModuleType) -> Path | None:
    """The folder in `sys.path` that a module was found in; None for one that is installed."""
    origin = getattr(module, "__file__", None)
    if origin is None:
        return None
    parts = module.__name__.count(".") + (Path(origin).stem == "__init__")
    root = Path(origin).absolute().parents[parts]  # as it is written: a package may be a link
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    return None if root.resolve() in installed else root


def _beside(source: str) -> tuple[Path, ...]:
    """The folders of what a source imports: a notebook finds modules beside itself, and services do not."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    known = sys.stdlib_module_names | {"troupe"}
    modules = [sys.modules.get(name) for name in names if name.partition(".")[0] not in known]
    return tuple(dict.fromkeys(root for module in modules if module and (root := _root(module))))


def _program() -> Path | None:
    """The file of the program that runs; None in a notebook and at a prompt."""
    name = getattr(sys.modules["__main__"], "__file__", None)
    return Path(name).resolve() if name and Path(name).is_file() else None


def _is_of_file(env: Any, file: Path) -> bool:
    """Whether a class or function is written in a file; IPython may have run it, and has gone on since."""
    name = file_of(env)
    return not name or Path(name).resolve() == file


def _of_program(file: Path, name: str) -> Brought:
    module, main = file.stem, sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:  # `python -m package.program`
        return Brought(f"{spec.name}:{name}", file.parents[spec.name.count(".")])
    if not module.isidentifier() or file.suffix != ".py" or module in sys.stdlib_module_names:
        raise ConfigError(
            f"services cannot import {file.name}, which has {name}: rename it, so that it is neither one of "
            "Python's own modules nor more than letters, digits and _"
        )
    return Brought(f"{module}:{name}", file.parent)


def check_caller() -> None:
    """Refuse a training that is started from where none can be.

    Raises:
        ConfigError: by a service, or the check of an environment, which imports the program and would run it
            once more, without end; or by another thread than the main one.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.startswith("troupe.services."):
        raise ConfigError(
            "a service that imports the program for its environment would start the training again: put "
            'what starts it under `if __name__ == "__main__":`'
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("a training has to be started from the main thread, which gets the signals")
