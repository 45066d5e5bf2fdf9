"""Named choices that user code can extend: optimizers, activations, norms, losses, metrics, data sources, schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxtrain.config.errors import ConfigError, nearest


class Registry[T]:
    """The values that a setting can name, in order of registration.

    Built-in values are registered by the module that defines them; a script registers its own before it calls
    `jaxtrain.resolve` or `jaxtrain.train`, and names them in its configuration.
    """

    def __init__(self, setting: str) -> None:
        self.setting = setting
        self._values: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers a value under `name`; raises ConfigError where the name is taken."""
        if name in self._values:
            raise ConfigError(f"{self.setting} {name!r} is already registered: choose another name")

        def add(value: T) -> T:
            self._values[name] = value
            return value

        return add

    def unregister(self, name: str) -> None:
        """Remove a value, so that its name can be registered again (for notebooks and tests)."""
        self._values.pop(name, None)

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            raise ConfigError(
                f"{self.setting} is {name!r}, which is not registered{nearest(name, self._values)}; "
                f"known: {', '.join(self._values) or 'none'}"
            )
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
