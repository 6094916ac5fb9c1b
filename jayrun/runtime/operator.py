"""`Operator` and `Resource`: what user code derives from, with its inputs declared by annotations."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_origin

from jayrun.errors import PlacementUnavailableHere
from jayrun.runtime.data import Data

if TYPE_CHECKING:
    from jayrun.runtime.placement import PlacementInterface


@dataclass(frozen=True, slots=True)
class Input:
    """One declared input of an operator or resource: a value, or a resource to be set up."""

    name: str
    resource: type[Resource] | None


class _Declared:
    """What operators and resources share: annotated inputs, and `self.placement` while they run."""

    _namespace: ClassVar[Mapping[str, Any]] = {}
    _interface: PlacementInterface | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # Annotations may be strings that name classes local to the function which defines this class.
        cls._namespace = sys._getframe(1).f_locals if "<locals>" in cls.__qualname__ else {}

    @property
    def placement(self) -> PlacementInterface:
        """The door to accelerator capacity, open while `execute()` or `setup()` runs.

        Raises `PlacementUnavailableHere` at any other time and in a forked child.
        """
        if self._interface is None:
            raise PlacementUnavailableHere(
                f"self.placement of {type(self).__name__} is there only while a Runtime runs execute() or setup()"
            )
        return self._interface


def declared_inputs(cls: type[_Declared]) -> tuple[Input, ...]:
    """The inputs that `cls` and its bases declare, in order. Raises TypeError for an annotation that names nothing."""
    found: dict[str, Input] = {}
    for base in reversed(cls.__mro__):
        if base in (object, _Declared, Operator, Resource) or not issubclass(base, _Declared):
            continue
        for name, annotation in inspect.get_annotations(base).items():
            kind = _evaluated(base, name, annotation)
            if name.startswith("_") or kind is ClassVar or get_origin(kind) is ClassVar:
                continue
            found[name] = Input(name, kind if isinstance(kind, type) and issubclass(kind, Resource) else None)
    return tuple(found.values())


def _evaluated(base: type[_Declared], name: str, annotation: object) -> object:
    if not isinstance(annotation, str):
        return annotation
    try:
        # The author's own annotation, evaluated where it was written, as typing.get_type_hints does.
        return eval(annotation, vars(sys.modules[base.__module__]), dict(base._namespace))
    except NameError as error:
        raise TypeError(
            f"input {name!r} of {base.__name__}: annotation {annotation!r} cannot be resolved: {error}"
        ) from None


def bound(cls: type[_Declared], given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every declared input: what was given, else the class's default, else for a resource itself.

    Raises TypeError naming inputs that are missing or that `cls` does not declare.
    """
    inputs = {each.name: each for each in declared_inputs(cls)}
    if unknown := sorted(set(given) - set(inputs)):
        known = ", ".join(inputs) or "none"
        raise TypeError(f"{cls.__name__} has no input {unknown[0]!r}; it declares: {known}")
    values: dict[str, Any] = {}
    for name, each in inputs.items():
        if name in given:
            values[name] = given[name]
        elif hasattr(cls, name):
            values[name] = getattr(cls, name)
        elif each.resource is not None:
            values[name] = each.resource()
        else:
            raise TypeError(f"{cls.__name__} needs the input {name!r}")
        if each.resource is not None and not isinstance(values[name], each.resource):
            raise TypeError(
                f"input {name!r} of {cls.__name__} must be a {each.resource.__name__}, not {values[name]!r}"
            )
    return values


def check_inputs(cls: type[_Declared], given: Mapping[str, Any]) -> None:
    """Refuse what a submitted run of `cls` could not be given: unknown or missing inputs, and resources, which its
    worker makes itself. Raises TypeError."""
    resources = {each.name for each in declared_inputs(cls) if each.resource is not None}
    if passed := sorted(resources & set(given)):
        raise TypeError(
            f"{cls.__name__} takes the resource {passed[0]!r} as its class declares it: "
            "a submitted run gets JSON values and no objects"
        )
    bound(cls, given)


class Operator(_Declared):
    """One piece of work. Derive, annotate inputs, and write `execute()`.

    Inputs are given by name to `Runtime.run` and arrive as attributes, each a `Data`; an input annotated with a
    `Resource` class arrives as the Data that its `setup()` returned. `execute` may be a coroutine function. It may be
    invoked several times: reserve first, then work.
    """

    def execute(self) -> Any:
        """Do the work and return a `Data`. To be written by the subclass."""
        raise TypeError(f"{type(self).__name__} must define execute()")


class Resource(_Declared):
    """Something costly that operators share: set up once per process and configuration, cached, torn down when it
    stands idle in the way of somebody who waits, and when the Runtime closes.

    Annotated inputs are its configuration, given to the constructor, and must be hashable:
    `EncoderModel(path="encoder.bin")`.
    """

    def __init__(self, **configuration: Any) -> None:
        values = bound(type(self), configuration)
        for name, value in values.items():
            setattr(self, name, value)
        self._configuration = values
        try:
            hash(self._key)
        except TypeError as error:
            raise TypeError(f"configuration of {type(self).__name__} must be hashable: {error}") from None

    @property
    def _key(self) -> tuple[Any, ...]:
        """Equal keys share one set-up."""
        return (
            type(self),
            *(
                (name, value._key if isinstance(value, Resource) else value)
                for name, value in self._configuration.items()
            ),
        )

    @property
    def _described(self) -> str:
        """What another process knows it by: the key, written down."""
        settings = ", ".join(
            f"{name}={value._described if isinstance(value, Resource) else repr(value)}"
            for name, value in self._configuration.items()
        )
        return f"{type(self).__module__}.{type(self).__qualname__}({settings})"

    def setup(self) -> Data:
        """Make it and return a `Data`. To be written by the subclass; may be a coroutine function."""
        raise TypeError(f"{type(self).__name__} must define setup()")

    def teardown(self, data: Data) -> None:
        """Undo `setup()`; its lease ends when nothing holds `data` any more."""
