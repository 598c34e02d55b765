"""Federated averaging: three clinics train one model together, and their data stays local.

The rounds are one pipeline. In each of them every clinic trains the model on its own data, in an external program
(``federated_trainer.py``), and ``hub`` averages the models. A clinic that fails, or takes too long, is left out of the
round: two of three are enough. The metrics of the programs are drawn while they train.
"""

import asyncio
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from dfm_async import Federation, Job, Pipeline, Program, Repeat, Reply, Result, Session, Yield, gather
from dfm_async.events import FailureHandled, Metrics
from dfm_async.exchange import Model

ROUNDS = 5
TRAINER = Path(__file__).with_name("federated_trainer.py")

fed = Federation("clinics")
hub = fed.site("hub")
clinics = [fed.site(name) for name in ("north", "south", "west")]

program = Program(argv=[sys.executable, TRAINER], launch_once=True)


# A function declares the parameters and the result of a program. It never runs.
@clinics[0].operation(program=program)
def train(model: Model, round: int, total_rounds: int) -> Model:
    """Train the model for one round."""
    raise NotImplementedError


@clinics[0].operation(program=program)
def validate(model: Model) -> Model:
    """Evaluate the model."""
    raise NotImplementedError


for clinic in clinics[1:]:
    clinic.operation(train)
    clinic.operation(validate)


@hub.operation
def initial(features: int) -> Model:
    """Return an untrained model."""
    weights = np.random.default_rng(1).normal(size=features)
    return Model(params={"weights": weights, "bias": np.zeros(())}, meta={"round": 0})


@hub.operation
def average(replies: list[Reply[Model]], number: int) -> Model:
    """Average models, weighted by the number of rows that each has seen."""
    models = [reply.value for reply in replies]
    rows = [model.meta["rows"] for model in models]
    params = {
        name: np.average([model.params[name] for model in models], axis=0, weights=rows) for name in models[0].params
    }
    metrics = {"accuracy": mean_accuracy(replies)}
    return Model(params=params, metrics=metrics, meta={"round": number + 1})


@hub.operation
def mean_accuracy(replies: list[Reply[Model]]) -> float:
    """Average the accuracies of the clinics."""
    return float(np.mean([(reply.value.metrics or {})["accuracy"] for reply in replies]))


with Pipeline("federated averaging") as pipeline:
    with Repeat(initial(20), times=ROUNDS) as model:
        number = model.meta["round"]
        training = [train(model, round=number, total_rounds=ROUNDS, site=clinic) for clinic in clinics]
        averaged = average(gather(training, at_least=2, within=60), number)
        Yield(averaged.metrics, place="before")  # measured before the training of this round
        model.next(averaged)
    validation = [validate(model, site=clinic) for clinic in clinics]
    Yield(mean_accuracy(gather(validation, at_least=2, within=60)), place="final")


class Chart:
    """A line for each clinic, which grows while its program trains."""

    def __init__(self) -> None:
        self._lines: dict[str, list[float]] = {clinic.name: [] for clinic in clinics}
        self._drawn = False
        self.lost: list[str] = []

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of a program."""
        self._lines[metrics.site].append(float(metrics.values["accuracy"]))
        if sys.stdout.isatty():
            self.draw()

    def draw(self) -> None:
        """Draw all lines; on a terminal over the previous ones."""
        if self._drawn:
            print(f"\033[{len(self._lines)}F", end="")
        self._drawn = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns - 1
        for site, values in self._lines.items():
            marks = "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int((value - 0.5) * 16)))] for value in values)
            text = f"{site:6} {marks:<22}{values[-1]:6.1%}" if values else site
            print(text[:width].ljust(width) if self._drawn else text)


async def watch(job: Job, chart: Chart) -> list[float]:
    """Follow a job by its events. Return the accuracy before each round, and after the last."""
    before: dict[int, float] = {}
    final = 0.0
    async for event in job.events():
        if isinstance(event, Metrics):
            chart.add(event)
        elif isinstance(event, FailureHandled):
            round_text = f" in round {event.frame[1] + 1}" if len(event.frame) > 1 else ""
            chart.lost.append(f"without {event.site}{round_text}: {event.type_name}")
        elif isinstance(event, Result):
            if event.place == "final":
                final = event.value
            else:
                before[event.frame[-1]] = event.value["accuracy"]
    return [*(before[number] for number in sorted(before)), final]


async def main() -> None:
    start = time.perf_counter()
    chart = Chart()
    print("accuracy at each clinic, while it trains")
    async with Session(fed) as session:
        job = await session.execute(pipeline)
        accuracies = await watch(job, chart)
        status = await job
    chart.draw()
    print(*chart.lost, sep="\n", end="\n" if chart.lost else "")
    print("\nthe common model, averaged over the clinics")
    for number, accuracy in enumerate(accuracies):
        print(f"after round {number}  {accuracy:6.1%}  {'█' * round(40 * (accuracy - 0.4))}")
    seconds = time.perf_counter() - start
    print(f"\n{status}: final accuracy {accuracies[-1]:.1%} after {ROUNDS} rounds, in {seconds:.2f} s")


if __name__ == "__main__":
    asyncio.run(main())
