"""Reads hostile documents in a process of its own, where every import, call and file is watched: ``python -m`` runs it.

What it prints is what the documents made Python do. A first look at harmless documents loads what is needed for that.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np  # what libraries do when they are loaded is their own affair

from dfm_async import Advise, Federation, Pipeline, Yield
from dfm_async.discovery import Discovery
from dfm_async.errors import DfmError
from dfm_async.federation.dfm_json import parse_pipeline
from dfm_async.planning.plan import Plan
from dfm_async.planning.prepare import prepare, prepare_discovery
from dfm_async.wire.codec import Codec
from tests.safety.documents import DFM_PIPELINES, FEDERATIONS, HEAD, LAZY, MARK, SERVICES, VALUES, call, dfm
from tests.safety.test_pipelines import BAD_BODIES, BAD_TEXT

LOADING = ("import", "exec", "compile", "open", "marshal.loads")
"""What also happens when a module of our own is used for the first time."""
WATCHED = (
    "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
    "os.spawn", "os.remove", "os.rename", "os.mkdir", "os.putenv", "os.chmod", "os.symlink", "os.link",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen", "shutil.rmtree", "sys.setprofile",
    "sys.settrace", "builtins.input", "webbrowser.open", "urllib.Request",
)  # fmt: skip

GOOD = (
    HEAD + "schemas: {m.S: {type: object, properties: {x: {type: string, pattern: 'a+'}}}}\n"
    "operations: {a.B: {parameters: {x: {$ref: '#/schemas/m.S'}, y: {type: [number, 'null']}}, required: [y]}}\n"
    "sites: {s: {interface: {'#/operations/a.B': {adapter: pkg.mod.Class}}}}\n"
)
GOOD_DFM = dfm(call("m.fed.api.a.B", y=1, site="s"))


def attempts(file: Path) -> list[Callable[[], Any]]:
    """Everything that is done with documents before anybody decides to run them."""
    file.write_text(GOOD)
    federation = Federation.from_yaml(file)

    def read(text: str) -> None:
        file.write_text(text, encoding="utf-8")
        found = Federation.from_yaml(file)
        repr(found)

    def use(pipeline: Pipeline) -> None:
        str(pipeline)
        pipeline.to_mermaid()
        pipeline.to_svg()
        plan = prepare(pipeline, federation, "home")
        Plan.from_json(plan.to_json())
        str(plan.explain())

    def serve(document: Any) -> None:
        services = Federation("services")
        services.add_openapi(document, site=services.site("here"))

    def ask() -> None:
        with Pipeline(mode="discovery") as pipeline:
            federation.operations.a.B(Advise())
        prepare_discovery(pipeline, federation, "home")

    with Pipeline() as simple:
        Yield([1, {"a": np.arange(3)}])
    found: list[Callable[[], Any]] = [
        lambda: read(GOOD),
        lambda: use(parse_pipeline(GOOD_DFM, federation)),
        lambda: use(simple),
        ask,
        lambda: Discovery.from_json(Discovery("d", {"s": {"n": None}}).to_json()),
        lambda: federation.models["m.S"],
    ]
    for document in SERVICES.values():
        found.append(lambda document=document: serve(document))  # type: ignore[misc]
    codec = Codec.for_untrusted()
    for text in (*FEDERATIONS.values(), *LAZY.values()):
        found.append(lambda text=text: read(text))  # type: ignore[misc]
    for text in DFM_PIPELINES.values():
        found.append(lambda text=text: use(parse_pipeline(text, federation)))  # type: ignore[misc]
    for data in VALUES.values():
        found.append(lambda data=data: codec.loads(data))  # type: ignore[misc]
    for text in BAD_TEXT:
        found.append(lambda text=text: use(Pipeline.model_validate_json(text)))  # type: ignore[misc]
        found.append(lambda text=text: Plan.from_json(text))  # type: ignore[misc]
        found.append(lambda text=text: Discovery.from_json(text))  # type: ignore[misc]
    for body in BAD_BODIES.values():
        found.append(lambda body=body: use(Pipeline.model_validate({"body": body})))  # type: ignore[misc]
    return found


def main(folder: Path) -> None:
    """Tries everything, twice: the first time may load modules of ours, and of the libraries that we use."""
    file = folder / "federation.dfm.yaml"
    everything = attempts(file)
    before = set(sys.modules)
    watched = set(WATCHED)
    seen: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event not in watched:
            return
        if event == "open":  # a reference may lead to any file that can be read; the document itself is ours to write
            path, _, flags = args
            if path == str(file) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        seen.append(f"{event} {str(args[:2])[:200]}")

    sys.addaudithook(watch)
    for _ in range(2):
        for attempt in everything:
            with contextlib.suppress(DfmError, ValueError):
                attempt()
        watched.update(LOADING)
    watched.clear()
    loaded = sorted(name for name in set(sys.modules) - before if MARK in name or name == "antigravity")
    print("\n".join([*loaded, *seen, f"tried {len(everything)}"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
