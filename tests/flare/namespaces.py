"""Networks that tests cut and heal: every participant of a federation in a network namespace of its own.

One more namespace stands between them. It passes on what they send to each other, and drops what a test has cut:
without a word, as a network that has failed. The namespaces are those of processes that end with this one, so that
nothing is left behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from dfm_async.deploy.local_flare import LocalFlare, Places
from dfm_async.deploy.project import SERVER_SITE
from tests.flare.shared import KITS, ROOT

HOME = "home"
_BETWEEN = "between"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of Linux


def _check_machine() -> None:
    """Without namespaces these tests would prove nothing: they fail."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        lacking = f"and {', '.join(missing)} cannot be found" if missing else "and this user is not root"
        raise RuntimeError(
            f"tests that cut networks need root and network namespaces, {lacking}: run them with nox as root on Debian "
            "or Ubuntu, which installs what is missing, or install it yourself (apt-get install iproute2 util-linux)"
        )


class Network:
    """Namespaces that reach each other, until they are cut. Made by :meth:`up`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._holders: dict[str, asyncio.subprocess.Process] = {}

    @classmethod
    @asynccontextmanager
    async def up(cls, names: Sequence[str]) -> AsyncIterator[Network]:
        """Makes a namespace for each name, and connects them."""
        _check_machine()
        network = cls(names)
        async with AsyncExitStack() as stack:
            for name in (_BETWEEN, *names):
                network._holders[name] = await stack.enter_async_context(_holder())
            for name in names:
                await network._connect(name)
            yield network

    async def _connect(self, name: str) -> None:
        number, pid = self._numbers[name], self._holders[name].pid
        port, near, far = f"port{number}", f"10.213.{number}.1", self.address(name)
        await self._ip(
            _BETWEEN,
            f"link add {port} type veth peer name outside netns {pid}",
            f"address add {near}/24 dev {port}",
            f"link set {port} up",
        )
        await self._ip(
            name,
            "link set lo up",
            f"address add {far}/24 dev outside",
            "link set outside up",
            f"route add default via {near}",
        )
        await _run(*self.prefix(_BETWEEN), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def address(self, name: str) -> str:
        """The address of a participant."""
        return f"10.213.{self._numbers[name]}.2"

    def prefix(self, name: str) -> tuple[str, ...]:
        """What a command begins with that runs in a namespace."""
        return ("nsenter", f"--net={self._path(name)}", "--")

    def _path(self, name: str) -> str:
        return f"/proc/{self._holders[name].pid}/ns/net"

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Has this thread, and what it starts, in a namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                _enter(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    async def cut(self, name: str, *others: str) -> None:
        """Drops everything between a participant and others; without any, between it and all."""
        await self._change("add", name, others)

    async def heal(self, name: str, *others: str) -> None:
        """Ends a cut, as it was made."""
        await self._change("delete", name, others)

    async def _change(self, how: str, name: str, others: Sequence[str]) -> None:
        here = self.address(name)
        ends = [self.address(other) for other in others] or ["all"]
        rules = [f"rule {how} from {a} to {b} blackhole" for end in ends for a, b in ((here, end), (end, here))]
        await self._ip(_BETWEEN, *rules)

    async def _ip(self, name: str, *commands: str) -> None:
        await _run(*self.prefix(name), "ip", "-batch", "-", said="\n".join(commands))


class Parted:
    """A federation whose participants have networks of their own; the test is at home. Made by :meth:`up`.

    Attributes:
        flare: the federation.
        network: what is between its participants.
    """

    def __init__(self, flare: LocalFlare, network: Network) -> None:
        self.flare = flare
        self.network = network

    @classmethod
    @asynccontextmanager
    async def up(cls, sites: Sequence[str], folder: Path, **options: Any) -> AsyncIterator[Parted]:
        """Starts a federation; this thread is in the network of home meanwhile."""
        names = list(dict.fromkeys([SERVER_SITE, HOME, *sites]))
        async with Network.up(names) as network:
            places = Places(network.address(SERVER_SITE), {name: network.prefix(name) for name in names})
            environment = {"PYTHONPATH": str(ROOT)}
            options = {"allow_code": True, "environment": environment, "kits": KITS, "journal": False, **options}
            async with LocalFlare.up(sites, folder, places=places, **options) as flare:
                with network.entered(HOME):
                    yield cls(flare, network)


@asynccontextmanager
async def _holder() -> AsyncIterator[asyncio.subprocess.Process]:
    """A process with a network of its own. It ends with this one, because it reads what we would say."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("unshare", "--net", "--", "cat", stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(b"there\n")
        assert await process.stdout.readline() == b"there\n", "network namespaces cannot be made here"
        yield process
    finally:
        process.stdin.close()
        await process.wait()


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


async def _run(*command: str, said: str = "") -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate(said.encode())
    assert process.returncode == 0, f"{command} failed: {output.decode()}"
