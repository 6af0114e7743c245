"""What the requests of a moment hold together: bounded, given back by each at its end."""

from typing import Self


class Busy(Exception):
    """Too much waits already."""


class Room:
    """So much may be held at a time."""

    def __init__(self, most: float) -> None:
        self.most, self.held = most, 0.0


class Share:
    """What one request holds of a room; a context manager that gives it back."""

    def __init__(self, room: Room) -> None:
        self._room, self._mine = room, 0.0

    def take(self, amount: float) -> None:
        """Takes more. Room for as much again must be left, so that large requests are refused before small ones."""
        if self._room.held + self._mine + amount > self._room.most:
            raise Busy
        self._room.held += amount
        self._mine += amount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.held -= self._mine
