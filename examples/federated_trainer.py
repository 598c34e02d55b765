"""The training program of ``federated_averaging.py``: an ordinary script, without an event loop.

A site launches it and sends it tasks. The data never leaves the program: it returns only parameters and metrics.
"""

import zlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dfm_async.exchange import Model, sync

EPOCHS = 4
FEATURES = 20
Array: TypeAlias = NDArray[np.float64]


def load(site: str, count: int = 600) -> tuple[Array, Array]:
    """Return the data of a site. All sites share one rule, but each has different data."""
    rule = np.random.default_rng(0).normal(size=FEATURES)
    noise = np.random.default_rng(zlib.crc32(site.encode()))
    spread = noise.uniform(0.2, 2.0, size=FEATURES)
    x = noise.normal(scale=spread, size=(count, FEATURES))
    y = (x @ rule + noise.normal(scale=1.5, size=count) > 0).astype(np.float64)
    return x, y


def predict(params: dict[str, Array], x: Array) -> Array:
    """Return the probability of class 1 for each row."""
    chances: Array = 1 / (1 + np.exp(-(x @ params["weights"] + params["bias"])))
    return chances


def score(params: dict[str, Array], x: Array, y: Array) -> dict[str, float]:
    """Evaluate a model."""
    chances = np.clip(predict(params, x), 1e-9, 1 - 1e-9)
    loss = -np.mean(y * np.log(chances) + (1 - y) * np.log(1 - chances))
    return {"loss": float(loss), "accuracy": float(np.mean((chances > 0.5) == y))}


def step(params: dict[str, Array], x: Array, y: Array, rate: float = 0.5) -> dict[str, Array]:
    """Take one gradient step over all rows."""
    error = predict(params, x) - y
    return {"weights": params["weights"] - rate * (x.T @ error) / len(y), "bias": params["bias"] - rate * error.mean()}


def main() -> None:
    agent = sync.init()
    x, y = load(agent.site)
    train, test = slice(0, 400), slice(400, None)
    while (task := sync.receive()) is not None:
        params = dict(task.data["model"].params)
        metrics = score(params, x[test], y[test])  # of the received model
        if task.name == "train":
            for epoch in range(EPOCHS):
                params = step(params, x[train], y[train])
                sync.log(score(params, x[test], y[test]), step=(task.round or 0) * EPOCHS + epoch)
        sync.send(Model(params=params, metrics=metrics, meta={"rows": 400}))


if __name__ == "__main__":
    main()
