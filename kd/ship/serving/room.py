"""What the requests of a moment hold together: bounded, given back by each at its end."""

from typing import Self


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Busy(Exception):
    """Too much waits already."""


class Room:
    def __init__(self, most: float) -> None:
        self.most, self.held = most, 0.0


class Share:
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
