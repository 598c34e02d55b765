"""A training script for NVFLARE as its users write it: nothing but numpy and ``nvflare.client``."""

import sys

import numpy as np
import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.client.tracking import SummaryWriter


def main() -> None:
    """Adds one to every parameter, round after round."""
    flare.init()
    writer = SummaryWriter()
    print("site", flare.system_info().get("site_name"), flush=True)
    while flare.is_running():
        model = flare.receive()
        writer.add_scalar("loss", 1.0 / (1 + model.current_round), global_step=model.current_round)
        params = {name: value + 1 for name, value in model.params.items()}
        loss = float(sum(np.sum(value) for value in params.values()))
        flare.send(
            FLModel(
                params=params, params_type=ParamsType.FULL, metrics={"sum": loss}, meta={"NUM_STEPS_CURRENT_ROUND": 1}
            )
        )
        if "--once" in sys.argv:
            break
    print("the loop has ended", flush=True)


if __name__ == "__main__":
    main()
