"""Our sessions where the real nv_dfm_core is installed: sites, providers and adapters are subclasses of its own."""

import asyncio
import json
import sys

import nv_dfm_core.exec

from dfm_async import Federation, Pipeline, Session, Yield


async def main(folder: str, target: str) -> list[tuple[str, object]]:
    """One operation of each federation, with all kinds of bindings, at a site and from a provider."""
    found: list[tuple[str, object]] = [("real", hasattr(nv_dfm_core.exec, "NetRunner"))]
    mini = Federation.from_yaml(f"{folder}/minifed/configs/federation.dfm.yaml")
    with Pipeline("mini") as pipeline:
        Yield(mini.operations.text.Label(number=3.5, site="alpha"), place="label")
        Yield(mini.operations.math.Square(x=3.0, site="alpha", provider="acme"), place="square")
    example = Federation.from_yaml(f"{folder}/examplefed/configs/federation.dfm.yaml")
    with Pipeline("greet") as greeting:
        Yield(example.operations.users.GreetMe(name="Ann", site="reception"), place="greeting")
    for federation, wanted in ((mini, pipeline), (example, greeting)):
        async with Session(federation, target=target) as session:  # type: ignore[arg-type]
            job = await session.execute(wanted)
            found += sorted([(result.place, result.value) for result in await job.collect()])
    return found


print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2]))))
