"""A disk whose power is cut under programs that write files: what fsync has made certain, and no more.

`Disk.watch` notes every fsync, rename, removal and new directory. `Disk.cut` makes a folder as the disk may
have it after any number of these, in which programs may `go_on`: the contents of a file are certain from its
fsync on, before that they are anything; names in a directory are certain from the directory's own fsync on,
before that any number of its last changes is missing.
"""

import os
import shutil
from pathlib import Path


class File:
    def __init__(self):
        self.content = None


class Directory:
    def __init__(self):
        self.certain, self.changes = {}, []

    def now(self, kept=None):
        names = dict(self.certain)
        for name, node in self.changes[:kept]:
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node
        return names


class Disk:
    def __init__(self, root: Path, pause=lambda: None):
        """`pause` is called after everything that is noted."""
        self.root, self.top = root, Directory()
        self.events, self._pause = [], pause
        self._before = {}  # what is there for certain, by name: bytes, or the like of a directory

    def go_on(self, root: Path):
        """Begin anew in `root`, which `cut` has made, or nobody: what is there is on the disk."""
        self.root, self.events = root, []
        self._before = _contents(root) if root.exists() else {}

    def _note(self, kind, path, more):
        if Path(path).is_relative_to(self.root):
            self.events.append((kind, Path(path), more))
            self._pause()

    def watch(self, monkeypatch):
        real = {
            name: getattr(os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
        }

        def fsync(descriptor):
            real["fsync"](descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_relative_to(self.root):
                self._note("fsync", path, None if path.is_dir() else path.read_bytes())

        def moved(name):
            def move(source, target, **more):
                real[name](source, target, **more)
                self._note("move", source, Path(target))

            return move

        def mkdir(path, *rest, **more):
            real["mkdir"](path, *rest, **more)
            self._note("mkdir", path, None)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", moved("rename"))
        monkeypatch.setattr(os, "replace", moved("replace"))
        monkeypatch.setattr(os, "mkdir", mkdir)
        removed = shutil.rmtree

        def rmtree(path, *rest, **more):
            there = Path(path).exists()
            removed(path, *rest, **more)
            if there:
                self._note("remove", path, None)

        monkeypatch.setattr(shutil, "rmtree", rmtree)

    def _parent(self, path):
        node = self.top
        for part in path.relative_to(self.root).parts[:-1]:
            node = node.now()[part]
        return node

    def cut(self, count: int, place: Path, choose) -> None:
        """Make `place` as the disk is after `count` events; `choose(n)` gives a number below n."""
        self.top = _certain(self._before)
        for kind, path, more in self.events[:count]:
            if path == self.root:
                if kind == "fsync":
                    self.top.certain, self.top.changes = self.top.now(), []
                continue
            parent, name = self._parent(path), path.name
            if kind == "mkdir":
                parent.changes.append((name, Directory()))
            elif kind == "remove":
                parent.changes.append((name, None))
            elif kind == "move":
                node = parent.now().get(name)
                if node is not None:
                    parent.changes += [(more.name, node), (name, None)]
            elif more is None:
                node = parent.now()[name]
                node.certain, node.changes = node.now(), []
            else:
                if name not in parent.now():
                    parent.changes.append((name, File()))
                parent.now()[name].content = more
        self._make(self.top, place, choose)

    def _make(self, directory, place, choose):
        place.mkdir(parents=True)
        for name, node in directory.now(choose(len(directory.changes) + 1)).items():
            if isinstance(node, Directory):
                self._make(node, place / name, choose)
            else:
                content = node.content if node.content is not None else os.urandom(choose(5000))
                (place / name).write_bytes(content)


def _contents(folder):
    return {
        path.name: _contents(path) if path.is_dir() else path.read_bytes()
        for path in sorted(folder.iterdir())
    }


def _certain(contents):
    """A directory of which all is on the disk."""
    directory = Directory()
    for name, found in contents.items():
        if isinstance(found, dict):
            directory.certain[name] = _certain(found)
        else:
            directory.certain[name] = node = File()
            node.content = found
    return directory
