"""The child process that uses FLARE's admin API for an application.

That API blocks, has threads of its own, and must not be left open: in a process of its own it does no harm. The
application sends requests over the socket that is the standard input of this process; the process ends with the socket.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from dfm_async.base.framing import HEAD

COMMAND: Final = "dfm_async"
"""The app command that carries messages between applications and the hub."""
_RETRY: Final = 0.1
"""The pause before a login is retried, in seconds."""
_RUNNING: Final = ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")
_DETAIL_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""The pauses before a detail that FLARE has not written yet is read again, in seconds."""
T = TypeVar("T")


class _Link:
    """Whole messages over a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._in = connection.makefile("rb")
        self._lock = threading.Lock()

    def read(self) -> Any:
        (size,) = HEAD.unpack(self._exactly(HEAD.size))
        return msgspec.msgpack.decode(self._exactly(size))

    def _exactly(self, count: int) -> bytes:
        data = self._in.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def write(self, message: Any) -> None:
        """Write an answer; the application may have gone meanwhile."""
        data = msgspec.msgpack.encode(message)
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(HEAD.pack(len(data)) + data)


class _Admin:
    """One user's connection to the server: its methods are those of ``admin.Admin``."""

    def __init__(self, kit: str, user: str, timeout: float) -> None:
        from nvflare.fuel.flare_api.flare_api import new_secure_session
        from nvflare.fuel.hci.client import api

        # FLARE first tries to log in before it is connected, and then sleeps for a second.
        login = api.Authenticator
        api.Authenticator = lambda **given: login(**{**given, "retry_interval": _RETRY})
        self._session: Any = new_secure_session(username=user, startup_kit_location=kit, timeout=timeout)

    def last_seen(self) -> dict[str, float]:
        return {client.name: float(client.last_connect_time) for client in self._session.get_connected_client_list()}

    def host_jobs(self, name: str) -> list[tuple[str, list[str]]]:
        """Return the jobs with this name that have not ended, the oldest first, and the sites that each was refused by.

        FLARE reports jobs of an earlier incarnation of the server as running, for ever: they are left out.
        """
        began = float(self._session.get_system_info().server_info.start_time)

        def listed() -> list[dict[str, Any]]:
            found = self._session.list_jobs(name_prefix=name, detailed=True, reverse=False)
            return [job for job in found if job.get("name") == name and _runs(job, began)]

        alive = _read_again(listed, lambda jobs: any(map(_lacks_detail, jobs)))
        alive.sort(key=lambda job: (float(job.get("submit_time") or 0), str(job["job_id"])))
        return [(str(job["job_id"]), _refused_by(job)) for job in alive]

    def submit(self, folder: str) -> str:
        return str(self._session.submit_job(folder))

    def ended(self, job_id: str) -> str:
        return _outcome(lambda: self._session.get_job_meta(job_id))

    def abort(self, job_id: str) -> None:
        self._session.abort_job(job_id)

    def command(self, job_id: str, data: dict[str, Any], timeout: float) -> Any:
        self._session.set_timeout(timeout)
        return self._session.do_app_command(job_id, COMMAND, data)

    def close(self) -> None:
        self._session.close()


def _read_again(read: Callable[[], T], incomplete: Callable[[T], bool]) -> T:
    """Read until the answer is complete, or for about as long as FLARE may take to complete it."""
    found = read()
    for pause in _DETAIL_PAUSES:
        if not incomplete(found):
            break
        time.sleep(pause)
        found = read()
    return found


def _lacks_detail(job: dict[str, Any]) -> bool:
    """Return whether FLARE has not written yet where a job was deployed: it writes the status first."""
    return job.get("status") in ("DISPATCHED", "FINISHED:FAILED_TO_RUN") and not job.get("job_deploy_detail")


def _outcome(read_meta: Callable[[], dict[str, Any]]) -> str:
    """Return how and why a job has ended; empty if it has not."""
    meta = _read_again(read_meta, _lacks_detail)
    status = str(meta.get("status", ""))
    if not status.startswith("FINISHED"):
        return ""
    details = [str(detail) for detail in meta.get("job_deploy_detail") or ()]
    return "; ".join([status, *(detail for detail in details if not detail.endswith(": OK"))])


def _runs(job: dict[str, Any], began: float) -> bool:
    """Return whether a job has not ended, at a server that started at that time."""
    if str(job.get("status")) not in _RUNNING:
        return False
    try:
        return datetime.datetime.fromisoformat(str(job.get("start_time"))).timestamp() >= began
    except ValueError:  # it was not started yet
        return True


def _refused_by(job: dict[str, Any]) -> list[str]:
    """Return the participants that a job could not be deployed to."""
    details = (str(detail).partition(": ") for detail in job.get("job_deploy_detail") or ())
    return [site for site, _, detail in details if detail != "OK"]


def _serve(link: _Link, requests: queue.SimpleQueue[Any]) -> None:
    admin: _Admin | None = None
    while (request := requests.get()) is not None:
        name, args = request["op"], request.get("args", [])
        try:
            if name == "open":
                admin = _Admin(*args)
                answer = None
            else:
                answer = getattr(admin, name)(*args)
        except BaseException as error:  # noqa: BLE001 - reported to the application
            kind = type(error).__name__
            link.write({"id": request["id"], "error": f"{kind}: {error}", "kind": kind})
        else:
            link.write({"id": request["id"], "result": answer})
    if admin is not None:
        admin.close()
    _end(0)  # FLARE's threads may hang in the interpreter's own end


def main() -> None:
    """Serve the application until it ends."""
    logging.disable(logging.CRITICAL)  # errors are reported to the application
    tempfile.tempdir = tempfile.mkdtemp(prefix="dfm-")  # FLARE leaves there what it could not submit
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # FLARE prints tracebacks, too
        os.dup2(null, number)
    link = _Link(connection)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(link, requests), daemon=True).start()
    try:
        while True:
            request = link.read()
            if request["op"] == "close":
                break
            requests.put(request)
    except (EOFError, OSError):
        _end(0)  # the application is gone
    requests.put(None)
    threading.Event().wait(5)  # the other thread ends the process
    _end(1)


def _end(code: int) -> NoReturn:
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    os._exit(code)


if __name__ == "__main__":
    main()
