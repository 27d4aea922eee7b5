"""A family of environments outside this tree, which an installed package has declared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from troupe.common.envs.base import EnvSpec, VectorEnv
from troupe.common.errors import ConfigError, TroupeError, caught, raised_line
from troupe.common.families import ENTRY_POINTS
from troupe.common.installation import import_module

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig


class OutsideFamily:
    """The functions of its module, which may raise and return anything."""

    def __init__(self, name: str, module: str) -> None:
        self._named = f"the family {name} of {module}"
        self._module = import_module(module, self._named)

    def settings(self, spec: EnvSpec) -> set[str]:
        """Fields of `[env]` that it uses."""
        fields: set[str] = self._call("settings", set, spec)
        return fields

    def make_spec(self, config: EnvConfig) -> EnvSpec:
        """See `troupe.common.envs.make_spec`."""
        spec: EnvSpec = self._call("make_spec", EnvSpec, config)
        return spec

    def make_vector(self, config: EnvConfig, num_slots: int, *args: Any, **options: Any) -> VectorEnv:
        """See `troupe.common.envs.make_vector`."""
        vector: VectorEnv = self._call("make_vector", VectorEnv, config, num_slots, *args, **options)
        return vector

    def _call(self, function: str, kind: type[Any], *args: Any, **options: Any) -> Any:
        called = getattr(self._module, function, None)
        if called is None:
            raise ConfigError(
                f"{self._named} has no function {function}; the entry point in {ENTRY_POINTS} should name "
                "the module that has it"
            )
        try:
            result = called(*args, **options)
        except TroupeError:
            raise
        except caught() as error:  # a stranger's code may raise anything
            raise ConfigError(f"{self._named} failed in {function}: {raised_line(error)}") from error
        if not isinstance(result, kind):
            raise ConfigError(
                f"{self._named} returned a {type(result).__name__} from {function}, not a {kind.__name__}"
            )
        return result
