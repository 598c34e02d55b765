"""Adapters, sites and providers that federations of the tests name by their paths. Nothing here imports the library,
but for the two base classes: adapters need not know it."""

from __future__ import annotations

import asyncio
import logging
import threading
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from dfm_async.site import Provider, Site


def note_end(folder: str, what: str) -> None:
    """Write into a file what was closed, if there is a folder for it."""
    if folder:
        with (Path(folder) / "ends").open("a") as file:
            file.write(f"{what}\n")


class Lab(Site):
    """A site object with attributes of its own, and an end."""

    def __init__(self, folder: str = "", scale: int = 1, **rest: Any) -> None:
        super().__init__(**rest)
        self.folder = folder
        self.scale = scale
        self.nothing = 0

    def close(self) -> None:
        note_end(self.folder, "site")


class Shelf(Provider):
    def __init__(self, site: Lab, label: str = "plain") -> None:
        super().__init__(site=site)
        if label == "none":
            raise ValueError("a shelf needs a label")
        self.label = label

    async def aclose(self) -> None:
        note_end(self.site.folder, "provider")  # type: ignore[attr-defined]


class Echo:
    """Gives back what it was called with."""

    async def body(self, **given: Any) -> dict[str, Any]:
        return given


class EchoInThread:
    def body(self, **given: Any) -> dict[str, Any]:
        return {**given, "on_loop": threading.current_thread() is threading.main_thread()}


class Greedy:
    """Changes what it gets."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    async def body(self, x: int, const: list[int], default: dict[str, int]) -> list[int]:
        self.seen.append(x)
        const.append(x)
        default[str(x)] = x
        return [len(self.seen), len(const), len(default)]


class Placed:
    """Wants to know where it is."""

    def __init__(self, site: Any, provider: Any = None, power: int = 1) -> None:
        self.site = site
        self.provider = provider
        self.power = power
        self.calls = 0

    async def body(self, x: int) -> dict[str, Any]:
        self.calls += 1
        context = self.site.dfm_context
        return {
            "value": x**self.power,
            "site": context.this_site,
            "home": context.homesite,
            "federation": self.site.federation_name,
            "version": self.site.api_version,
            "itself": self.site.site is self.site,
            "job": context.job_id,
            "provider": getattr(self.provider, "label", None),
            "calls": self.calls,
        }

    def close(self) -> None:
        note_end(getattr(self.site, "folder", ""), "adapter")


class Logs:
    """Uses its logger as one uses loggers."""

    def __init__(self, site: Any) -> None:
        self.logger: logging.Logger = site.dfm_context.logger

    async def body(self, x: int) -> bool:
        self.logger.info("plain %s", x, extra={"mine": 1})
        self.logger.getChild("part").warning("of a part")
        self.logger.debug("unheard")
        self.logger.setLevel(logging.ERROR)
        self.logger.warning("unheard")
        return isinstance(self.logger, logging.Logger)


class Teller:
    """Says things on every way out."""

    def __init__(self, site: Any) -> None:
        self.site = site

    async def body(self, key: str, how: str) -> Any:
        if how == "log":
            logging.getLogger("elsewhere").warning("the key is %s", key)
            self.site.dfm_context.logger.warning("once more: %r", {"key": key})
        elif how == "print":
            print("printed", key)
        elif how == "span":
            with self.site.telemetry_span("opened", {"key": key, "list": [1]}) as span:
                if span is not None:
                    span.set_attribute("again", key)
                    span.set_ok()
        elif how == "raise":
            error = ValueError(f"refused: {key!r}")
            error.add_note(f"with {key}")
            raise error from KeyError(key)
        elif how == "trace":
            try:
                dict[str, str]()[key]
            except LookupError:
                logging.getLogger("elsewhere").exception("failed with %s", key)
        elif how == "url":
            raise ConnectionError(f"https://example.org/?{urllib.parse.urlencode({'token': key})}")
        return len(key)


class Numbers:
    """Gives elements one by one."""

    async def body(self, n: int) -> AsyncIterator[int]:
        async def count() -> AsyncIterator[int]:
            for number in range(n):
                yield number
                await asyncio.sleep(0)

        return count()


class NumbersInThread:
    def body(self, n: int) -> Iterator[int]:
        return iter(range(n))


class Generator:
    def body(self, n: int) -> Iterator[int]:
        yield from range(n)


class AsyncGenerator:
    async def body(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number


class Total:
    async def body(self, values: list[int]) -> int:
        assert type(values) is list
        return sum(values)


class Contextual:
    async def body(self, x: int, context: Any) -> str:
        return f"{context.operation} of {x}"


class AsksItself:
    """Gets a secret by the site, in its own way."""

    def __init__(self, site: Any) -> None:
        self.site = site

    def body(self, key: str) -> int:
        return len(self.site.secret_for_key(key))


class AsksOnLoop(AsksItself):
    async def body(self, key: str) -> int:  # type: ignore[override]
        return len(self.site.secret_for_key(key))


class Files:
    def __init__(self, site: Any) -> None:
        self.site = site

    def body(self, name: str, text: str) -> str:
        path = self.site.cache_storage("notes") / name
        path.write_text(text)
        return f"{path.parent.name}/{path.name}: {path.read_text()}"


class Sender:
    def __init__(self, site: Any) -> None:
        self.site = site

    async def body(self, job: str, value: int) -> None:
        await self.site.dfm_context.send_to_place(job, "desk", "x", False, None, value)


class Broken:
    def __init__(self, size: int = 1) -> None:
        raise OSError(f"no room for {size}")

    async def body(self, x: int) -> int:
        return x


class NoBody:
    pass


class ColdVault:
    """A vault of somebody's own, which blocks."""

    def __init__(self, secrets: dict[str, str], fail: str = "") -> None:
        if fail:
            raise ValueError(f"bad configuration: {fail}")
        self._secrets = secrets

    def secret_for_key(self, key: str) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return self._secrets[key]


class StuckVault:
    """One that is not there before it may be."""

    begun, may_be = threading.Event(), threading.Event()

    def __init__(self) -> None:
        self.begun.set()
        self.may_be.wait()

    def secret_for_key(self, key: str) -> str:
        return key


class RemoteVault:
    """One that is asynchronous."""

    def __init__(self, value: str) -> None:
        self._value = value

    async def secret_for_key(self, key: str) -> str:
        await asyncio.sleep(0)
        if key == "none":
            raise KeyError(f"{key}, but {self._value} is there")
        return self._value


class ClosingVault:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def secret_for_key(self, key: str) -> str:
        return "from a vault with an end"

    def close(self) -> None:
        (Path(self._folder) / "closed").touch()
