"""A module of another package that has imported something: its names are not its own."""

from subprocess import Popen, run

__all__ = ["Bodiless", "Popen", "run"]

built: list[object] = []


class Bodiless:
    """Neither an adapter nor a vault; whoever builds it is caught."""

    def __init__(self, **_: object) -> None:
        built.append(self)
