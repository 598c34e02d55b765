"""The logger that adapters get from their site."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

__all__ = ["JobLogger"]


class JobLogger(logging.Logger):
    """A logger of a job: what it says goes to the logger of its name, with more about where it comes from.

    Adapters for DFM expect a logger, with ``getChild`` and ``setLevel``; a ``LoggerAdapter`` is none. It is not
    registered, so it ends with the job.

    Args:
        name: the name of the logger that handles the records.
        about: what every record has besides.
    """

    def __init__(self, name: str, about: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.parent = logging.getLogger(name)
        self._about = about

    def isEnabledFor(self, level: int) -> bool:
        """Tells whether records of a level are made. Nothing is remembered, for nobody tells it what changes."""
        return not self.disabled and self.manager.disable < level and level >= self.getEffectiveLevel()

    def getChild(self, suffix: str) -> JobLogger:
        """Gives a logger with a longer name, of the same job."""
        return JobLogger(f"{self.name}.{suffix}", self._about)

    def makeRecord(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Makes a record."""
        record = super().makeRecord(*args, **kwargs)
        record.__dict__.update(self._about)
        return record
