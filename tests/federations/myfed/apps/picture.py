"""Draws slices of an array. The cells of a notebook as DFM's users write them, one after the other."""

from typing import Any

from myfed.fed.api.array import Create, Plot2D, Subset
from myfed.fed.runtime.homesite import get_session
from nv_dfm_core.api import ErrorToken, Pipeline, PlaceParam, StopToken, Yield
from nv_dfm_core.session import JobStatus

if __name__ == "__main__":
    # connect

    session = get_session(target="local", max_concurrent_jobs=2)
    session.connect()

    # build the pipeline

    with Pipeline() as pipeline:
        whole = Create(site="loader", shape=(4, 5, 6), min=-500, max=500)
        part = Subset(site="loader", array=whole, index=PlaceParam(place="index"))
        picture = Plot2D(site="plotter", array=part)
        Yield(value=picture)

    prepared = session.prepare(pipeline)

    # run it

    pictures: list[Any] = []
    tokens: list[str] = []

    def collect(from_site: str, from_node: Any, frame: Any, place: str, data: Any) -> None:
        if isinstance(data, (StopToken, ErrorToken)):
            what = "stop" if isinstance(data, StopToken) else data.errors[0].type
            tokens.append(f"{place} {frame.is_stop_frame()} {what}")
        else:
            pictures.append(data)

    def run(*indices: list[int]) -> None:
        params = [{"index": index} for index in indices]
        job = session.execute(prepared, input_params=params, default_callback=collect)
        assert job.job_id
        finished = job.wait_until_finished(timeout=60.0)
        print(finished, job.get_status() == JobStatus.FINISHED, len(pictures), sorted(tokens))
        tokens.clear()

    run([0], [1])
    print(pictures[0].shape, pictures[0].dtype, pictures[0].min(), pictures[0].max())
    run([1, 2])  # a row is no picture

    session.close()
