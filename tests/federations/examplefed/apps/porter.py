"""Asks a site of the federation for a greeting. An application as DFM's users write them, for generated code."""

import argparse
import sys
from typing import Any, Literal

import examplefed.fed.runtime.concierge
from examplefed.fed.api.users import GreetMe
from examplefed.fed.site.concierge.users import GreetMe as GreetMeHere
from nv_dfm_core.api import Pipeline, PlaceParam, Yield
from nv_dfm_core.exec._frame import Frame
from nv_dfm_core.session import JobStatus
from nv_dfm_core.session._session import Session, configure_session_logging


class Porter:
    def __init__(self) -> None:
        self._session: Session | None = None

    def arrive(self, target: Literal["flare", "local"]) -> None:
        logger = configure_session_logging(force_enable=False)
        self._session = examplefed.fed.runtime.concierge.get_session(target=target, logger=logger)
        self._session.connect()

    def leave(self) -> None:
        if self._session:
            self._session.close()
            self._session = None

    def greet_in_own_words(self, name: str, words: str) -> None:
        with Pipeline() as pipeline:
            greeting = GreetMeHere(name=PlaceParam(place="name"), greeting=PlaceParam(place="words"))
            _ = Yield(value=greeting)
        self._run(pipeline, {"name": name, "words": words}, restrict_to_sites="homesite")

    def greet_at(self, site: str, name: str) -> None:
        with Pipeline() as pipeline:
            _ = Yield(value=GreetMe(site=site, name=name))
        self._run(pipeline, {})

    def _run(self, pipeline: Pipeline, params: dict[str, Any], **options: Any) -> None:
        assert self._session is not None
        prepared = self._session.prepare(pipeline=pipeline, debug=False, **options)
        job = self._session.execute(
            prepared,
            input_params=params,
            default_callback=self._other,
            place_callbacks={"yield": self._greeting},
        )
        _ = job.wait_until_finished(timeout=60.0)
        assert job.get_status() == JobStatus.FINISHED, job.get_status()

    @staticmethod
    def _greeting(from_site: str, _node: int | str | None, frame: Frame, place: str, data: Any) -> None:
        print(f"{from_site} -> {place} {list(frame.frame)}: {data}")

    @staticmethod
    def _other(_from_site: str, _node: int | str | None, frame: Frame, place: str, data: Any) -> None:
        what = "all" if frame.is_stop_frame() else list(frame.frame)
        print(f"{place}: {type(data).__name__} of {what}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--at", default="concierge", choices=["concierge", "server", "reception"])
    parser.add_argument("--words")
    parser.add_argument("--target", default="flare", choices=["flare", "local"])
    chosen = parser.parse_args()

    porter = Porter()
    porter.arrive(chosen.target)
    try:
        if chosen.words:
            porter.greet_in_own_words(chosen.name, chosen.words)
        else:
            porter.greet_at(chosen.at, chosen.name)
    finally:
        porter.leave()
    print("bye")


if __name__ == "__main__":
    main()
