"""`[sweep]` of a sweep file, as it is checked."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_RUNS = 10_000


class HalvingSection(BaseModel):
    """`[sweep.halving]`: trials that lag end early, see `troupe.services.experiments.halving`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    first_steps: int = Field(ge=1)
    eta: int = Field(3, ge=2, le=100)


class PopulationSection(BaseModel):
    """`[sweep.population]`: bad runs go on as good ones, see `troupe.services.experiments.population`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    interval_steps: int = Field(ge=1)


class SweepSection(BaseModel):
    """`[sweep]`: what differs between the runs, and how they are made; docs/sweeps.md explains the keys."""

    # Strict: `seeds = "3"` would otherwise be taken for the number.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    preset: str = ""
    seeds: int | list[int] = Field(0)
    parallel: int = Field(1, ge=1, le=64)
    deterministic: bool = False
    suite: str = ""
    grid: dict[str, Any] = {}
    # `list` as a name in the class would hide the type for the annotations that follow it.
    entries: list[dict[str, Any]] = Field([], alias="list")
    search: dict[str, Any] = {}
    trials: int = Field(0, ge=0, le=MAX_RUNS)
    study: Literal["random", "tpe"] = "random"
    pruner: Literal["median", "none"] = "median"
    halving: HalvingSection | None = None
    population: PopulationSection | None = None

    @property
    def course(self) -> str:
        """How runs depend on each other while they are under way, in a word; empty: not at all."""
        return "halving" if self.halving else "a population" if self.population else ""
