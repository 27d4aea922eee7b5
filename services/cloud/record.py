"""What this computer knows of a run in AWS, in a file: whoever comes after a crash goes on from it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from troupe.common.errors import ConfigError
from troupe.common.runtime.files import MAX_JSON_BYTES, atomic_write, check_regular, readable
from troupe.services.cloud.layout import Layout
from troupe.services.cloud.spending import Spending

FOLDER = "cloud"
"""Of a run directory: Terraform's files and state, the keys, this record."""


class Record(BaseModel):
    """A run in AWS.

    Attributes:
        run: its name there.
        preset: what it was begun from.
        region: of AWS.
        budget_usd: all that it may cost.
        until: its goal, as it was said; empty for none.
        evaluated: whether it has an evaluator.
        total_steps: of its configuration.
        layout: its machines, with the actors that there should be now.
        max_actors: actor processes at most.
        bucket_gb: of checkpoints and record, as far as a fetch is paid for.
        prices: date of the prices that dollars are counted with.
        bucket: its bucket; empty before there is one.
        began_s: when machines were first asked for, in seconds since 1970; 0 before.
        usd: spent up to `counted_s`.
        counted_s: in seconds since 1970.
        hourly_usd: what an hour costs since then.
        stop_s: when AWS itself ends the machines; 0 where it was not told.
        ended: why it has ended, and all of it is destroyed; empty before.
    """

    model_config = ConfigDict(extra="forbid")

    run: str
    preset: str
    region: str
    budget_usd: float
    until: str = ""
    evaluated: bool
    total_steps: int
    layout: Layout
    max_actors: int
    bucket_gb: float
    prices: str
    bucket: str = ""
    began_s: float = 0.0
    usd: float = 0.0
    counted_s: float = 0.0
    hourly_usd: float = 0.0
    stop_s: float = 0.0
    ended: str = ""

    @property
    def spending(self) -> Spending:
        """Dollars up to the last look."""
        return Spending(self.usd, self.counted_s, self.hourly_usd)

    def spent(self, spending: Spending) -> None:
        """Take note of what has been spent."""
        self.usd, self.counted_s = spending.usd, spending.until_s
        self.hourly_usd = spending.hourly_usd

    def write(self, run_dir: Path) -> None:
        """Write it; after a power cut it is there."""
        atomic_write(run_dir / FOLDER / "run.json", self.model_dump_json(indent=1).encode())


def read_record(run_dir: Path) -> Record | None:
    """Return what is known of the run; None where the directory is of no run in AWS.

    Raises:
        ConfigError: the file cannot be read, or is not what this version writes.
    """
    file = run_dir / FOLDER / "run.json"
    with readable(run_dir):
        if not file.exists():
            return None
        text = check_regular(file, MAX_JSON_BYTES).read_bytes()
    try:
        return Record.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its text"
        raise ConfigError(
            f"{file} is damaged ({where}: {first['msg']}): the machines still end at the time set in AWS; "
            f"`terraform -chdir={file.parent / 'terraform'} destroy` deletes them now"
        ) from None
