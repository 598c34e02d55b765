"""Writes values with a real NVFLARE. Runs inside an environment that has it: python fobs_samples.py > fobs_2_8_3.json.

The names are those in test_fobs.py, which has the same values in our terms.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import OrderedDict
from datetime import datetime, timedelta, timezone
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
    "heartbeat": "",
    "none": None,
    "booleans": [True, False],
    "integers": [0, 1, -1, 127, 128, -32, -33, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -(2**63)],
    "floats": [0.0, -1.5, 1e300, float("inf")],
    "texts": ["", "a" * 31, "b" * 32, "c" * 255, "d" * 256, "\u00e4\u20ac\U0001f600"],
    "bytes": [b"", b"\x00" * 255, b"\x01" * 256],
    "dict": {"a": [1, {"b": None}], 2: "two", None: 0, 1.5: 1, b"k": 2},
    "tuple": (1, ("a", [2])),
    "tuple key": {(1, "a"): 2},
    "enum key": {DataKind.METRICS: 1},
    "set": {5},
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict([((1, 2), [3])]))]),
    "datetime": datetime(2024, 2, 29, 12, 30, 1, 250),
    "aware datetime": datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=2))),
    "float64": np.float64(0.1),
    "float32": np.float32(0.1),
    "int64": np.int64(-(2**62)),
    "int32": np.int32(7),
    "array": np.arange(12, dtype=np.float64).reshape(3, 4),
    "fortran array": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "sliced array": np.arange(20, dtype=np.uint8)[::3],
    "scalar array": np.array(4.5),
    "empty array": np.zeros((0, 3), dtype=np.float32),
    "boolean array": np.array([True, False]),
    "complex array": np.array([1 + 2j], dtype=np.complex64),
    "text array": np.array(["a", "\u00e4b"]),
    "bytes array": np.array([b"a", b"bcd"]),
    "datetime array": np.array(["2024-02-29"], dtype="datetime64[D]"),
    "big endian array": np.array([1, 2], dtype=">i4"),
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
    "large text": "x" * 1024,
    "large bytes": b"y" * 1024,
    "just not large": ["x" * 1023, b"y" * 1023],
    "large wide text": "\u20ac" * 1024,
    "large array": np.arange(200, dtype=np.float64),
    "large fortran array": np.asfortranarray(np.arange(200, dtype=np.float64).reshape(10, 20)),
    "large values": shareable(a=np.arange(200), b="t" * 2000, c=("u" * 2000, [b"v" * 2000])),
    "large metric": DXO(DataKind.ANALYTIC, data={"d": "w" * 1500}, meta={"m": b"z" * 1500}),
    "large in ordered": OrderedDict([("k", b"o" * 1024), ("l", ("p" * 1024,))]),
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
