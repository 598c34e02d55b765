"""Prepares a pipeline with nv_dfm_core, in an environment that has it; prints how many seconds that took.

Needs nothing of ours: ``python prepare_dfm.py SHAPE NODES``. The federation is made here, as generated code would.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Literal

SITES = ("a", "b", "c")


def main() -> None:
    from nv_dfm_core.api import BestOf, Operation, Pipeline, PlaceParam, Yield
    from nv_dfm_core.gen.irgen import IRGen
    from nv_dfm_core.gen.irgen._fed_info import (
        ComputeCostInfo,
        FedInfo,
        OperationInfo,
        SendCostInfo,
        SiteInfo,
    )

    class Stage(Operation):  # type: ignore[misc] # it is not installed where types are checked
        dfm_class_name: Literal["bench.Stage"] = "bench.Stage"
        __api_name__ = "bench.Stage"
        v: Any

    logging.disable(logging.CRITICAL)
    shape, count = sys.argv[1], int(sys.argv[2])
    info = OperationInfo(
        operation="bench.Stage", compute_cost=ComputeCostInfo(fixed_time=0.1, output_factor=1.0), is_async=True
    )
    everyone = (*SITES, "home")
    fed = FedInfo(
        sites={
            name: SiteInfo(
                interface={"bench.Stage": info} if name in SITES else {},
                providers={},
                send_cost={other: SendCostInfo(fixed_time=0.01, bandwidth=1_000_000) for other in everyone},
            )
            for name in everyone
        }
    )
    sites: list[Any] = [
        {"one": "a", "turns": SITES[i % 3], "free": BestOf(sites=list(SITES))}[shape] for i in range(count)
    ]
    with Pipeline() as pipeline:
        value: Any = PlaceParam(place="x")
        for site in sites:
            value = Stage(site=site, v=value)
        Yield(value=value)
    sys.setrecursionlimit(100_000)
    start = time.perf_counter()
    IRGen().prepare(
        pipeline=pipeline, candidate_sites=None, federation_module_name="bench", fed_info=fed, homesite="home"
    )
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
