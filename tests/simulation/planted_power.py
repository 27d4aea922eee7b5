"""Bugs to be found by power cuts: something does not wait for the disk."""

from __future__ import annotations

from typing import Any

from tests.simulation.plants import Change, around, near
from troupe.common.data.format import RECORDS_FILE
from troupe.common.wire import messages
from troupe.services.replay.requests import RequestHandlers
from troupe.services.replay.storage.group_commit import GroupCommit
from troupe.services.replay.storage.opened import Opened
from troupe.services.replay.storage.replay import Replay


@near("", "power_cut")
def inserts_are_acknowledged_before_the_sync() -> Change:
    def acknowledge(real: Any, self: Any, peer: bytes, incarnation: int, sequence: int) -> None:
        self.server.send(peer, messages.Inserted(credit=self._credit_of(peer)), sequence)
        if self._commit is not None:
            self._commit.begin()

    return around(RequestHandlers, "_acknowledge", acknowledge)


@near("", "power_cut")
def the_newest_sync_is_taken_for_the_next() -> Change:
    def begin(real: Any, self: Any) -> int:
        real(self)
        return int(self._begun)

    return around(GroupCommit, "begin", begin)


@near("", "power_cut")
def records_are_left_out_of_a_sync() -> Change:
    return _not_synced(RECORDS_FILE)


@near("", "power_cut")
def a_column_is_left_out_of_a_sync() -> Change:
    return _not_synced("obs.raw")


@near("", "power_cut")
def a_power_cut_is_taken_for_a_restart() -> Change:
    def init(real: Any, self: Any, *args: Any) -> None:
        real(self, *args)
        self.lost_power = False

    return around(Opened, "__init__", init)


@near("small", "power_cut")
def the_oldest_chunk_leaves_after_a_power_cut() -> Change:
    def restore(real: Any, self: Any, *args: Any) -> None:
        real(self, *args)
        row = self.store.space.oldest() if self._opened.lost_power else None
        if row is not None:
            commit = self.store.drop(row)
            for table in self.tables.values():
                table.drop_chunk(row, commit)

    return around(Replay, "_restore", restore)


def _not_synced(name: str) -> Change:
    """What waits for the disk does not wait for this file."""

    def sync(real: Any, self: Any) -> None:
        pager, files = self._pager, self._pager._files
        pager._files = [file for file in files if file.name != name]
        try:
            real(self)
        finally:
            pager._files = files

    return around(Replay, "sync", sync)
