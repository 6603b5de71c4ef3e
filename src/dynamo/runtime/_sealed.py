"""What the public handle classes have in common with the genuine, compiled ones.

They cannot be subclassed, copied or pickled; most cannot be constructed either.  With
`__slots__` (each class names its own) they take no new attributes and no weak
references.  Nothing here knows any of those classes.  And how they all take text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import override
else:

    def override(method: object) -> object:
        """Stand-in for `typing.override` (3.12), which only type checkers look at."""
        return method


__all__ = ["Numbered", "Sealed", "Unconstructible", "override", "text_argument"]


def text_argument(name: str, value: object) -> str:
    """An argument that must be text, and such as can be sent.

    Raises:
        TypeError: it is none.
        UnicodeEncodeError: it holds a lone surrogate.
    """
    if not isinstance(value, str):
        raise TypeError(
            f"argument '{name}': '{type(value).__name__}' object cannot be converted "
            "to 'PyString'"
        )
    value.encode()
    return value


class Sealed:
    """No subclasses of subclasses, no copies."""

    __slots__ = ()

    @override
    def __init_subclass__(cls) -> None:
        for base in cls.__bases__:
            if issubclass(base, Sealed) and base.__module__ != __name__:
                raise TypeError(
                    f"type {base.__qualname__!r} is not an acceptable base type: "
                    "wrap the object instead of subclassing its class"
                )

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot copy or pickle {type(self).__name__!r} object: it belongs to the "
            "process that made it"
        )


class Unconstructible(Sealed):
    """Also no constructor: our own code makes instances with `cls.__new__(cls)`."""

    __slots__ = ()

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(f"No constructor defined for {type(self).__name__}")


class Numbered(Unconstructible):
    """A member of an enumeration of the genuine kind.

    It equals its number and nothing else, has no order and cannot be hashed: an
    `enum.IntEnum` would be more.
    """

    __slots__ = ("_name", "_number")
    __hash__ = None  # type: ignore[assignment]

    _name: str
    _number: int

    @classmethod
    def _make_members(cls, names: Iterable[str], first: int) -> None:
        """Make the members, numbered from ``first``, and put them on the class."""
        for number, name in enumerate(names, first):
            member = cls.__new__(cls)
            member._name = name  # noqa: SLF001 - a member of this class
            member._number = number  # noqa: SLF001
            setattr(cls, name, member)

    def __int__(self) -> int:
        return self._number

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbered):
            return self is other
        return isinstance(other, int) and self._number == other

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self._name}"
