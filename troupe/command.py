"""Where the `troupe` command begins, before any package is imported whose name another file may have."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PACKAGES = ("common", "services")


def main() -> int:
    """Run the command; one line and exit code 2 where another file stands in the way of Troupe's packages."""
    other = _in_the_way()
    if other:
        print(f"troupe: error: {other} hides a package of Troupe: rename it", file=sys.stderr)
        return 2
    from services.__main__ import main as run

    return run()


def _in_the_way() -> str:
    """Return the file or folder that would be imported instead of a package beside this one; or nothing."""
    here = Path(__file__).resolve().parents[1]
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found = Path(spec.origin).resolve()
            if found != here / name / "__init__.py":
                return str(found.parent if found.name == "__init__.py" else found)
    return ""
