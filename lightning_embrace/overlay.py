"""Attributes that are laid over objects of the user's for as long as training lasts."""

from __future__ import annotations

_NOTHING = object()


class Overlay:
    """Sets attributes of objects, and leaves the objects as they were found."""

    def __init__(self) -> None:
        self._laid: list[tuple[object, str, object]] = []

    def lay(self, owner: object, name: str, value: object) -> None:
        """Sets an attribute of this one object; its class stays as it is.

        Args:
            owner: The object.
            name: The attribute.
            value: What it is meanwhile.
        """
        self._laid.append((owner, name, vars(owner).get(name, _NOTHING)))
        vars(owner)[name] = value

    def remove(self) -> None:
        """Takes all of them away."""
        while self._laid:
            owner, name, before = self._laid.pop()
            if before is _NOTHING:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
