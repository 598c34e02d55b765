"""Untrusted files: each is a pipeline or an error with its place, and never anything else."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from dfm_async import PipelineError
from dfm_async.planning.prepare import prepare
from tests.federation.dfm_json.rig import DATA, core, minifed, node, ref, square
from tests.support.damage import spots

FED = minifed()
SEEDS = [json.loads((DATA / name).read_text()) for name in ("nv_dfm_core.json", "older.json")]
JUNK: list[Any] = [
    None, True, False, 0, -1, 2**70, 1e308, "", "x", "@dfm-node", [], {}, [[]], [None], {"": {}},
    {"tag": "@dfm-node"}, {"tag": ["@dfm-node"], "ident": 0}, node({}), node(None), node("hello"), ref(0), ref(node(0)),
    {"id": ref(0)}, {"tag": "@dfm-place-param", "place": {}}, {"tag": "@dfm-best-of", "sites": [1]},
    {"tag": "@dfm-advise"}, {"tag": "__dfm__pickled__"}, {"operator": "and", "exp": {}}, {"operator": []}, square(0),
    core("If", 1, cond=ref(0)), core("TryFromCache", 5, key=ref("hello"), dfm_body=[core("_WriteToCache", 6)]),
]  # fmt: skip


def broken(chance: random.Random) -> Any:
    data = copy.deepcopy(chance.choice(SEEDS))
    for _ in range(chance.randint(1, 4)):
        places = spots(data)
        if not places:
            break
        holder, key = chance.choice(places)
        kind = chance.randrange(4)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other, name = chance.choice(places)
            holder[key] = copy.deepcopy(other[name]) if name in range(len(other)) or name in other else None
        elif kind == 2 and isinstance(holder, dict):
            holder[chance.choice(["x", "dfm_body", "body", "dfm_after", "site", "key", "value", "tag", "id"])] = (
                chance.choice(JUNK)
            )
        else:
            holder[key] = copy.deepcopy(chance.choice(JUNK))
    return data


@pytest.mark.parametrize("seed", range(10))
def test_a_broken_file_is_an_error_with_its_place_or_a_valid_pipeline(seed: int) -> None:
    chance = random.Random(seed)
    outcomes: list[str] = []
    for _ in range(100):
        data = broken(chance)
        try:
            prepare(FED.pipeline_from_dfm(json.dumps(data)), FED, "home")
            outcomes.append("prepared")
        except PipelineError as error:
            outcomes.append("refused" if error.problems else "refused without a reason")
    assert set(outcomes) <= {"prepared", "refused"}
    assert outcomes.count("refused") > 20
