"""Write values with a real NVFLARE: python -m tests.exchange.fobs_samples > fobs_2_8_3.json, where that is installed.

The names are those in test_fobs.py, which has the same values in our terms.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import numpy as np
import nvflare
from nvflare.apis.analytix import AnalyticsDataType, LogWriterName
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.analytix_utils import create_analytic_dxo
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from tests.exchange import fobs_values


def task() -> Any:
    made = DXO(DataKind.WEIGHTS, data={"w": np.arange(6, dtype=np.float32).reshape(2, 3)}).to_shareable()
    made.set_header("__task_id__", "0f7a")
    made.set_header("__task_name__", "train")
    made.set_header("current_round", 1)
    made.set_header("num_rounds", 3)
    return made


def result() -> Any:
    model = FLModel(params={"w": np.zeros(2)}, metrics={"loss": 0.5}, meta={"NUM_STEPS_CURRENT_ROUND": 7})
    made = FLModelUtils.to_shareable(model)
    made.set_return_code("OK")
    return made


def context() -> Any:
    made = FLContext()
    made.set_prop("__identity_name__", "server", private=False, sticky=True)
    return made


def shareable(**items: Any) -> Any:
    made = Shareable()
    made.update(items)
    return made


def shareable_with_late_headers() -> Any:
    made = Shareable()
    headers = made.pop("__headers__")
    made["a"] = 1
    made["__headers__"] = headers
    return made


DATA_KINDS = ["FL_MODEL", "WEIGHTS", "WEIGHT_DIFF", "METRICS", "ANALYTIC", "COLLECTION", "STATISTICS", "PSI"]
SAMPLES: dict[str, Any] = {
    **fobs_values.PLAIN,
    "enum key": {DataKind.METRICS: 1},
    # Before NVFLARE 2.7 they are texts.
    "data kinds": [getattr(DataKind, name) for name in DATA_KINDS],
    "params types": list(ParamsType),
    "analytics data types": list(AnalyticsDataType),
    "log writers": list(LogWriterName),
    "shareable": Shareable(),
    "shareable with late headers": shareable_with_late_headers(),
    "task": task(),
    "result": result(),
    "dxo": DXO("OTHER", data={"x": [1]}, meta={"m": (1, 2)}),
    "metric": create_analytic_dxo(tag="loss", value=0.25, data_type=AnalyticsDataType.SCALAR, global_step=3),
    "mlflow metrics": create_analytic_dxo(
        tag="m", value={"a": 1.0}, data_type=AnalyticsDataType.METRICS, writer=LogWriterName.MLFLOW
    ),
    "context": {"ctx": context()},
}
LARGE: dict[str, Any] = {
    **fobs_values.LARGE,
    "large values": shareable(a=np.arange(200), b="t" * 2000, c=("u" * 2000, [b"v" * 2000])),
    "large metric": DXO(DataKind.ANALYTIC, data={"d": "w" * 1500}, meta={"m": b"z" * 1500}),
}
"""Written with a threshold of 1024."""


def main() -> None:
    flare_decomposers.register()
    common_decomposers.register()
    written = {name: fobs.dumps(value) for name, value in SAMPLES.items()}
    written |= {name: fobs.dumps(value, max_value_size=1024) for name, value in LARGE.items()}
    samples = {name: base64.b64encode(message).decode() for name, message in written.items()}
    json.dump({"nvflare": nvflare.__version__, "samples": samples}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
