"""A script of NVFLARE that trains, evaluates and submits its model, and writes records of all kinds."""

import importlib
import os
import sys
from typing import Any

import nvflare.client as flare
from nvflare.client.tracking import MLflowWriter, SummaryWriter, WandBWriter


def main() -> None:
    """Works with whatever the client gives it: arrays, or tensors of a stand-in for PyTorch."""
    flare.init()
    best: dict[str, Any] = {}
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        kind = "train" if flare.is_train() else "evaluate" if flare.is_evaluate() else "submit"
        seen = {
            "kind": kind,
            "meta": dict(model.meta),
            "site": flare.get_site_name(),
            "process": os.getpid(),
            "types": sorted({type(value).__name__ for value in (model.params or {}).values()}),
        }
        if flare.is_submit_model():
            flare.send(flare.FLModel(params=best, meta=seen))
        elif flare.is_evaluate():
            loss = float(model.params["w"][0]) - float(best["w"][0])
            flare.send(flare.FLModel(metrics={"loss": loss}, meta=seen))
        elif model.meta.get("send") == "DIFF":
            change = {name: value * 0 + 0.25 for name, value in model.params.items()}
            flare.send(flare.FLModel(params=change, params_type=flare.ParamsType.DIFF, meta=seen))
        else:
            write()
            best = {name: value + 1 for name, value in model.params.items()}
            if "--tensors" in sys.argv:
                torch = importlib.import_module("torch")
                best = {name: torch.as_tensor(value) for name, value in best.items()}
            flare.send(flare.FLModel(params=dict(best), meta=seen))


def write() -> None:
    """Uses every function of the writers once."""
    board = SummaryWriter()
    board.add_scalar("scalar", 1.5, global_step=3)
    board.add_scalars("scalars", {"a": 1.0, "b": 2.0}, global_step=3)
    WandBWriter().log({"w": 3.0}, step=4)
    flow = MLflowWriter()
    flow.log_param("rate", 0.1)
    flow.log_params({"layers": 2, "name": "net"})
    flow.log_metric("metric", 4.0, step=5)
    flow.log_metrics({"m": 5.0}, step=5)
    flow.log_text("words", "notes.txt")
    flow.set_tag("tag", "blue")
    flow.set_tags({"t": "red"})


if __name__ == "__main__":
    main()
