"""A process that starts worker processes by forking, with the runtime loaded.

The application and the server have one socket pair. A request is one byte with descriptors; the answer is the pid of
the new process, or why there is none. Each worker leads a process group of its own. When a worker ends, however it
does, the server kills what is left of its group before it reports the exit code: processes that operations have
started and left behind. When the application ends, its end of the socket pair closes, and the server kills all groups.

Unlike the fork server of the standard library, this one has no address, and a worker holds nothing whose end the
server waits for.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from multiprocessing import process, resource_tracker, spawn, util
from typing import Final, Protocol

from dfm_async.base.descriptors import close_in_children, disconnect, no_fork, occupy_standard_streams
from dfm_async.errors.root import exit_text
from dfm_async.workers.module_loading import preload

_log = logging.getLogger(__name__)

_PRELOAD: Final = ("dfm_async.workers.start", "dfm_async.workers.worker", "dfm_async.workers.debugger")
_ANSWER: Final = struct.Struct("<i")
_STATUS: Final = struct.Struct("<i")
_MOST_DESCRIPTORS: Final = 64
_CLOSE_ON_EXEC: Final[int] = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_GRACE: Final = 5.0
"""How long the server may take to end, in seconds."""


class ForkServerEnded(Exception):
    """The server has ended in the middle of a start. The next start launches another one."""


class Started:
    """A process that is being started: our ends of its pipes, and its own until it has them.

    Attributes:
        pid: the process.
        status: becomes readable when the process has ended; the fork server writes its exit code there.
        feed: what is written there is the first thing that the process reads.
        theirs: the descriptors for the process: to read the feed, and to keep or write the status.
    """

    def __init__(self) -> None:
        self.pid = 0
        self._open: list[int] = []
        with no_fork():
            close_in_children(self)
            try:
                self.status, their_status = self._pipe()
                their_feed, self.feed = self._pipe()
            except OSError:
                self.close()
                raise
        self.theirs = (their_feed, their_status)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open += ends
        return ends

    def sent(self) -> None:
        """Close the descriptors that the process has now."""
        for number in self.theirs:
            self._open.remove(number)
            os.close(number)

    def open_handle(self) -> int:
        """Return what becomes readable when a child of ours has ended, whatever it has forked."""
        if not hasattr(os, "pidfd_open"):
            return self.status
        with no_fork():
            handle = os.pidfd_open(self.pid)
            self._open.append(handle)
        return handle

    def write(self, data: bytes) -> None:
        """Write all of it. Blocks until the process has read most of it."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.feed, rest) :]

    def exit_code(self) -> int | None:
        """Read how the process has ended; None if the server has ended before it could report that."""
        data = os.read(self.status, _STATUS.size)
        return _STATUS.unpack(data)[0] if len(data) == _STATUS.size else None

    def close(self) -> None:
        """Close everything."""
        while self._open:
            os.close(self._open.pop())

    def close_in_child(self) -> None:
        """Disconnect everything."""
        for number in self._open:
            disconnect(number)


class Requester(Protocol):
    """Wants a process to be started."""

    abandoned: bool
    """Whether it does not want it any longer."""


class ForkServer:
    """A fork server that the sessions of this process share; the last to leave ends it."""

    _class_lock = threading.Lock()
    _shared: ForkServer | None = None

    def __init__(self) -> None:
        self._preload: tuple[str, ...] = ()
        self._users = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._loaded = False
        """Whether the server has answered a request: before, it loads modules and has no workers."""
        self._requests_lock = threading.Lock()
        """Guards the two below. Never held while anything waits, unlike the other lock."""
        self._requesters: set[Requester] = set()
        self._loading: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        """The server whose first answer is awaited."""

    @classmethod
    def acquire(cls, preload: tuple[str, ...]) -> ForkServer:
        """Return the fork server; it is started when the first process is."""
        occupy_standard_streams()
        with cls._class_lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._users += 1  # noqa: SLF001 - its own class
            cls._shared._preload = preload  # noqa: SLF001 - its own class
            return cls._shared

    def release(self) -> None:
        """End the server if nobody else uses it. Blocks for a moment, at most a few seconds."""
        with self._class_lock:
            self._users -= 1
            if self._users > 0 or ForkServer._shared is not self:
                return
            ForkServer._shared = None
        with self._lock:
            self._end(_GRACE if self._loaded else 0)

    def abandon(self, requester: Requester) -> None:
        """Stop waiting for the start of a process, if it waits for a server that still loads its modules.

        Such a server has no workers yet. It is killed when nobody else waits for it, and the start raises
        :exc:`ForkServerEnded`. A server that has loaded its modules answers at once. Does not block.
        """
        with self._requests_lock:
            requester.abandoned = True
            if self._loading is not None and all(waiting.abandoned for waiting in self._requesters):
                server, control = self._loading
                server.kill()
                with contextlib.suppress(OSError):  # a process that it has started may have the other end
                    control.shutdown(socket.SHUT_RDWR)

    @property
    def kept(self) -> set[int]:
        """Its pid, and its descriptor in this process."""
        found = set() if self._process is None else {self._process.pid}
        return found if self._control is None else found | {self._control.fileno()}

    def warm(self) -> None:
        """Start the server, so that the first worker need not wait for it. Blocks for a moment.

        If the system refuses, the first worker tries again, and reports why.
        """
        if not self._lock.acquire(blocking=False):  # a worker is being started: that may wait for a long time
            return
        try:
            if self._users:  # else it was released meanwhile
                self._ensure_running()
                tracker_descriptor()
        except OSError:
            _log.debug("the process that starts workers cannot be started yet", exc_info=True)
        finally:
            self._lock.release()

    def start(self, descriptors: list[int], requester: Requester) -> Started:
        """Fork a process that has these descriptors. Blocks until the server has done so.

        Raises:
            ForkServerEnded: the server has ended meanwhile, or the start was abandoned.
            OSError: the system refuses another process or descriptor.
        """
        started = Started()
        with self._requests_lock:
            self._requesters.add(requester)
        try:
            with self._lock:
                started.pid = self._request([*started.theirs, tracker_descriptor(), *descriptors], requester)
        except BaseException:
            started.close()
            raise
        finally:
            with self._requests_lock:
                self._requesters.discard(requester)
        started.sent()
        return started

    def _request(self, descriptors: list[int], requester: Requester) -> int:
        if not self._users:  # it was released: nobody would end another process
            raise ForkServerEnded("the last session that starts workers was closed")
        control = self._ensure_running()
        try:
            with self._requests_lock:
                if requester.abandoned:
                    raise ForkServerEnded("the start of the worker was abandoned")
                if not self._loaded and self._process is not None:
                    self._loading = self._process, control
            socket.send_fds(control, [b"+"], descriptors)
            data = control.recv(_ANSWER.size, socket.MSG_WAITALL)
        except ConnectionError as error:
            self._end(0)
            raise ForkServerEnded(f"the process that starts workers has ended ({error})") from error
        finally:
            with self._requests_lock:
                self._loading = None
        if len(data) < _ANSWER.size:
            code = self._end(0)
            raise ForkServerEnded(f"the process that starts workers has ended with {exit_text(code)}")
        self._loaded = True
        (answer,) = _ANSWER.unpack(data)
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return int(answer)

    def _ensure_running(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end(0)
        with no_fork():
            ours, theirs = socket.socketpair()
            close_in_children(ours)
            close_in_children(theirs)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [
                    os.fsdecode(spawn.get_executable()),
                    *interpreter_options(),
                    "-c",
                    "import gc, sys; gc.disable(); "  # nothing that is loaded becomes garbage
                    f"sys.path[:] = {search_path()!r}; "
                    f"from {__name__} import main; main({theirs.fileno()}, {self._preload!r})",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # what ends our group must not end it: it kills what workers leave behind
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control = ours
        self._loaded = False
        return ours

    def _end(self, grace: float) -> int | None:
        """End the server: let it see our end, and kill it if that takes too long. Returns its exit code."""
        control, self._control = self._control, None
        running, self._process = self._process, None
        if control is not None:
            with control, contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_WR)
                control.settimeout(grace)
                control.recv(1)
        if running is None:
            return None
        if running.poll() is None:
            running.kill()
        return running.wait()

    @classmethod
    def after_fork(cls) -> None:
        """Forget the parent's server, in a forked child."""
        shared, cls._shared = cls._shared, None
        cls._class_lock = threading.Lock()
        if shared is not None:
            shared._lock = threading.Lock()  # noqa: SLF001 - its own class
            shared._requests_lock = threading.Lock()  # noqa: SLF001 - its own class
            shared._control = None  # noqa: SLF001 - its own class
            if shared._process is not None:  # noqa: SLF001 - its own class
                shared._process.returncode = 0  # noqa: SLF001 - not a child of this process: nothing to wait for
                shared._process = None  # noqa: SLF001 - its own class


os.register_at_fork(after_in_child=ForkServer.after_fork)


def tracker_descriptor() -> int:
    """Return the descriptor of the resource tracker that this process shares with its workers; starts it if needed."""
    try:
        found = resource_tracker.getfd()
    except Warning:  # it was killed, and warnings are errors here: the second call starts another one
        found = resource_tracker.getfd()
    assert found is not None  # noqa: S101 - it runs now
    return found


def interpreter_options() -> list[str]:
    """Return the options of this interpreter for another one, which is given a search path of its own.

    In a folder that was deleted, Python 3.13.0 to 3.13.2 cannot import ``socket`` unless ``-P`` keeps the current
    folder out of the search path.
    """
    options: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 - no public name
    try:
        os.getcwd()
    except FileNotFoundError:
        options.append("-P")
    return options


def search_path() -> list[str]:
    """``sys.path`` for another process: the folder where we were started stands for the current one."""
    return [process.ORIGINAL_DIR or "" if entry == "" else entry for entry in sys.path]  # type: ignore[attr-defined]


def kill_group(leader: int) -> None:
    """Kill a process group, if there is anything in it. Its leader must not have been waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def exit_code_of(leader: int, flags: int = 0) -> int | None:
    """Wait for a child that leads a group, kill the rest of the group, and return the exit code of the child.

    With ``os.WNOHANG``, return None if it has not ended.
    """
    if hasattr(os, "waitid"):  # the group is killed first: until the leader is reaped, nobody else has its number
        if os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT | flags) is None:
            return None
        kill_group(leader)
        flags = 0
    pid, status = os.waitpid(leader, flags)
    if not pid:
        return None
    if not hasattr(os, "waitid"):
        kill_group(leader)
    return os.waitstatus_to_exitcode(status)


_inherited: Final[list[int]] = []
"""In a worker: the descriptors that came with the request, in order."""


class InheritedDescriptor:
    """A descriptor in what a worker is sent: the number that it has there."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Return the number, in the worker."""
        return _inherited[self._index]


# in the server


def main(control: int, modules: tuple[str, ...]) -> None:
    """Run the server until the application ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    occupy_standard_streams()
    for name in _PRELOAD:
        with contextlib.suppress(ImportError):  # reported by the workers that need it
            importlib.import_module(name)
    preload(modules)
    gc.freeze()  # collecting it would copy pages that the workers share
    gc.enable()
    _Server(socket.socket(fileno=control)).run()


class _Server:
    def __init__(self, control: socket.socket) -> None:
        control.set_inheritable(False)
        self._control = control
        self._workers: dict[int, int] = {}
        """The pipe for the exit code of each worker."""
        self._woken, self._wake = os.pipe()

    def run(self) -> None:
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            ready = {number for number, _ in poll.poll()}
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._serve():
                break
        for pid in self._workers:
            kill_group(pid)

    def _reap(self) -> None:
        for pid in list(self._workers):
            code = exit_code_of(pid, os.WNOHANG)
            if code is not None:
                status = self._workers.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # the application has ended
                    os.write(status, _STATUS.pack(code))
                os.close(status)

    def _serve(self) -> bool:
        """Take a request; False if there will be none any longer."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._control, 1, _MOST_DESCRIPTORS, _CLOSE_ON_EXEC)
        except ConnectionError:
            return False
        if not data:
            return False
        for number in descriptors:
            os.set_inheritable(number, False)
        pid = 0
        if flags & socket.MSG_CTRUNC:
            answer = -errno.EMFILE
        else:
            try:
                answer = pid = os.fork()
            except OSError as error:
                answer = -(error.errno or errno.EAGAIN)
            else:
                if pid == 0:
                    self._become_worker(descriptors)
        if pid:
            with contextlib.suppress(OSError):  # it has done so itself, or ended
                os.setpgid(pid, pid)
            self._workers[pid] = descriptors.pop(1)
        for number in descriptors:
            os.close(number)
        with contextlib.suppress(ConnectionError):  # seen by the next call
            self._control.sendall(_ANSWER.pack(answer))
        return True

    def _become_worker(self, descriptors: list[int]) -> None:
        """Run the process that the application describes. Does not return."""
        code = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            feed, status, tracker, *_inherited[:] = descriptors
            self._control.close()
            for number in (self._woken, self._wake, status, *self._workers.values()):
                os.close(number)
            resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined] # noqa: SLF001 - as in the standard library
            code = spawn._main(feed, os.dup(feed))  # noqa: SLF001 - as in the standard library
        except EOFError:  # the application has ended while it started this process
            code = 1
        except BaseException:  # noqa: BLE001 - the process must end here, whatever happens
            sys.excepthook(*sys.exc_info())
        finally:
            _flush()
            os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
