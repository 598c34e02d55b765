"""The terminal of the application, as threads of a worker wait for it."""

from __future__ import annotations

import socket
import threading

from dfm_async.workers.lent_terminal import LentTerminal, TerminalAccess
from tests.support.waiting import PROMPT


def test_thread_that_waits_for_the_terminal_does_not_block_others() -> None:
    application, granted = socket.socketpair()
    waits, problems = threading.Event(), []
    uses: list[bool] = []

    def use(used: bool) -> None:
        uses.append(used)
        waits.set()

    terminal = LentTerminal(TerminalAccess("/nowhere/tty", 1, granted), use)

    def debug() -> None:
        try:
            terminal.enter()
        except RuntimeError as error:
            problems.append(str(error))

    with application, granted:
        threads = [threading.Thread(target=debug, daemon=True) for _ in range(2)]
        threads[0].start()
        assert waits.wait(PROMPT)
        threads[1].start()
        leaving = threading.Thread(target=terminal.leave, daemon=True)
        leaving.start()
        leaving.join(PROMPT)
        assert not leaving.is_alive(), "it does not have the terminal: there is nothing to wait for"
        application.send(b"\0\0")
        for thread in threads:
            thread.join(PROMPT)
    assert len(problems) == 2
    assert all("cannot be used" in problem for problem in problems)
    assert uses in ([True, False], [True, False, True, False])
