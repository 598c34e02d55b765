"""Builds and runs pipelines with the real nv_dfm_core. Writes a line of JSON for each: what it is, and what it yielded.

Called as ``dfm_peer.py FOLDER``: the folder has the packages of the federations, and gets the generated code. Called as
``dfm_peer.py FOLDER read``, after that: reads pipelines from standard input, one per line, and writes them again.
"""

import importlib
import json
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])


def greetings() -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Pipelines of the federation that greets."""
    from examplefed.fed.api.users import GreetMe
    from examplefed.fed.site.concierge.users import GreetMe as GreetMeConcierge
    from nv_dfm_core.api import BestOf, Pipeline, PlaceParam, Yield, well_known_id

    with Pipeline(name="each site") as each:
        for site in ("concierge", "server", "reception"):
            Yield(value=GreetMe(site=site, name=PlaceParam(place="name", multiuse=True)), place=f"at_{site}")
    yield each, [{"name": "Ann"}, {"name": "Ben"}]

    with Pipeline(name="own words") as words:
        found = GreetMeConcierge(name="Ann", greeting="Hey {name}", dfm_node_id=well_known_id("hey"))
        Yield(value=found)
    yield words, [{}]

    with Pipeline(name="from site to site") as chain:
        first = GreetMe(site="server", name=PlaceParam(place="name"))
        second = GreetMe(site="reception", name=first)
        Yield(value=GreetMe(site="server", name=second), place="end")
        Yield(value=second, place="middle")
    yield chain, [{"name": str(number)} for number in range(5)]

    with Pipeline(name="the best of one") as best:
        Yield(value=GreetMe(site=BestOf(sites=["server"]), name="Ann"))
    yield best, [{}]

    with Pipeline(name="one after the other") as ordered:
        before = GreetMe(site="server", name="first")
        behind = GreetMe(site="server", name="second", dfm_after=before.dfm_node_id)
        Yield(value=behind, place="both", multiuse=True)
        Yield(value=before, place="both", multiuse=True)
    yield ordered, [{}]

    for seed in range(2):
        chance = random.Random(seed)
        with Pipeline(name=f"random {seed}") as some:
            found = [GreetMe(site="server", name=PlaceParam(place="name"))]
            for _ in range(8):
                site = chance.choice(["concierge", "server", "reception"])
                found.append(GreetMe(site=site, name=chance.choice([*found, "literal"])))
            for number, greeting in enumerate(chance.sample(found, 4)):
                Yield(value=greeting, place=f"place{number}")
        yield some, [{"name": "Ann"}, {"name": "Ben"}]

    with Pipeline(name="a letter") as letter:
        Yield(value=GreetMe(site="server", name="Ann").fieldref(4))
    yield letter, [{}]


def arrays() -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Pipelines of the federation that draws."""
    from myfed.fed.api.array import Create, Plot2D, Subset
    from nv_dfm_core.api import Pipeline, PlaceParam, Yield

    with Pipeline(name="plot") as plot:
        whole = Create(site="loader", shape=[4, 5, 6], min=-500, max=500)
        Yield(value=Plot2D(site="plotter", array=Subset(site="loader", array=whole, index=[0])))
    yield plot, [{}]

    with Pipeline(name="what the site binds") as bound:
        Yield(value=Create(site="loader", shape=PlaceParam(place="shape")))
    yield bound, [{"shape": [2]}, {"shape": [2, 3]}]

    with Pipeline(name="fields") as fields:
        whole = Create(site="loader", shape=[3, 2], max=6)
        Yield(value=whole.fieldref(1), place="row")
        Yield(value=whole.fieldref("shape"), place="shape")
    yield fields, [{}]


FEDERATIONS = {"examplefed": ("concierge", greetings), "myfed": ("homesite", arrays)}


def generate(name: str) -> None:
    """Writes the code that nv_dfm_core needs of a federation."""
    from nv_dfm_core.gen.apigen import ApiGen

    found = ApiGen.from_yaml_file(str(FOLDER / name / "configs" / "federation.dfm.yaml"))
    found.generate_api("python", outpath=FOLDER)
    found.generate_runtime("python", outpath=FOLDER)


def run(session: Any, pipeline: Any, params: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs a pipeline; gives what it yielded, and what went wrong."""
    from nv_dfm_core.api import ErrorToken

    yielded: list[list[Any]] = []
    errors: list[str] = []

    def callback(_site: Any, _node: Any, frame: Any, place: str, data: Any) -> None:
        if isinstance(data, ErrorToken):
            errors.append(str(data))
        elif not place.startswith("_dfm_"):
            yielded.append([place, list(frame.frame), data.tolist() if hasattr(data, "tolist") else data])

    job = session.execute(session.prepare(pipeline), input_params=params, default_callback=callback)
    if not job.wait_until_finished(timeout=30):
        errors.append("did not finish")
    return {"yielded": yielded, "errors": errors}


def read() -> None:
    """Reads pipelines and writes them again, without running them."""
    from nv_dfm_core.api import Pipeline

    for line in sys.stdin:
        print(Pipeline.model_validate_json(line).model_dump_json(), flush=True)


def main() -> None:
    """Answers on a copy of standard output; what others print goes to standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.ERROR)
    os.environ["DFM_LOCAL_REATTACH_FINISH_GRACE_SECONDS"] = "0"  # else the fifth job waits for ever
    sys.path.insert(0, str(FOLDER))
    for name, (homesite, pipelines) in FEDERATIONS.items():
        generate(name)
        session = importlib.import_module(f"{name}.fed.runtime.{homesite}").get_session(
            target="local", max_concurrent_jobs=2
        )
        session.connect()
        for pipeline, params in pipelines():
            text = json.loads(pipeline.model_dump_json())
            found = {"federation": name, "homesite": homesite, "pipeline": text, "params": params}
            answer.write(json.dumps({**found, **run(session, pipeline, params)}) + "\n")
            answer.flush()
        session.close()
    os._exit(0)  # threads of its sessions go on


if __name__ == "__main__":
    if sys.argv[2:] == ["read"]:
        sys.path.insert(0, str(FOLDER))
        read()
    else:
        main()
