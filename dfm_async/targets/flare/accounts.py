"""How many bytes jobs have sent to a site."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ["Account", "Accounts"]

_ACCOUNTS: Final = 10_000
"""Of how many jobs that have left the account is kept, so that one that comes again does not begin anew."""


class Account:
    """How many bytes a job has sent to this site, in all its runs."""

    __slots__ = ("allowed", "seats", "taken", "told")

    def __init__(self) -> None:
        self.taken = 0
        self.allowed: int | None = None
        """The least that was allowed for one of its locations; None means any number."""
        self.seats = 0
        """How many of its locations are here."""
        self.told = -1
        """The last run of which it was told that it has sent too much."""

    def limit(self, allowed: int | None) -> None:
        """Lowers what is allowed."""
        if allowed is not None:
            self.allowed = allowed if self.allowed is None else min(self.allowed, allowed)

    def fits(self, size: int) -> bool:
        """Whether so many further bytes are allowed."""
        return self.allowed is None or self.taken + size <= self.allowed


class Accounts:
    """The accounts of jobs, by their ids."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def of(self, job_id: str) -> Account:
        """The account of a job; a new one if it was never here."""
        account = self._accounts.get(job_id)
        if account is None:
            self._shed()
            account = self._accounts[job_id] = Account()
        self._accounts.move_to_end(job_id)
        return account

    def _shed(self) -> None:
        while len(self._accounts) >= _ACCOUNTS:
            idle = next((job_id for job_id, account in self._accounts.items() if not account.seats), None)
            if idle is None:
                return
            del self._accounts[idle]
