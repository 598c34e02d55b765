"""A federation of two sites, and a pipeline over both."""

from dfm_async import Federation, ForEach, Yield, collect

fed = Federation("newproject")
archive = fed.site("archive")
lab = fed.site("lab")


@archive.operation
async def load(day: str) -> list[float]:
    """Return the temperatures of one day."""
    return {"mon": [14.0, 19.5, 16.0], "tue": [9.5, 12.0]}[day]


@lab.operation
def anomaly(value: float, base: float = 15.0) -> float:
    """Return the difference between a value and the base."""
    return value - base


@lab.operation
def mean(values: list[float]) -> float:
    """Return the mean of some values."""
    return sum(values) / len(values)


@fed.pipeline
def anomalies(day: str, base: float = 15.0) -> float:
    """Yield the anomalies of one day as soon as they are known, and return their mean."""
    with ForEach(load(day)) as temperature:
        delta = anomaly(temperature, base)
        Yield(delta, place="anomaly")
    return mean(collect(delta))
