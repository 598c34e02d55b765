"""Reading a federation from its file is quick, and linear in its size.

1,000 operations with three parameters, each of them offered by ten sites: 10,000 adapters with bindings. The sites
refer to one list of adapters in another file, or each has them written out, in a file of 70,000 lines. Claimed: at most
a second if it is shared, and two if it is written out; and ten times as many operations take at most 15 times as long,
in processor time. Nothing is imported, so no code of adapters is part of it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.common import Block, Figure, Options, Target, interleave, main
from dfm_async import Federation

SIZES = (100, 1000)
SITES = 10

_OPERATION = """\
  mod{module}.Op{n}:
    description: Operation {n}
    parameters:
      x: {{type: number, description: A number}}
      y: {{type: [number, string]}}
      mode: {{type: string, default: quick}}
    required: [x]
    returns: number
"""
_ADAPTER = """\
      "#/operations/mod{module}.Op{n}":
        adapter: pkg.mod{module}.Op{n}
        args:
          x: {{from-param: x}}
          mode: {{from-param: mode}}
          limit: {{const: {n}}}
        compute_cost: {{fixed_time: 0.1}}
"""


def write(folder: Path, operations: int, *, shared: bool) -> Path:
    """Writes a federation with so many operations, each at ten sites."""
    adapters = "".join(_ADAPTER.format(n=n, module=n % 10) for n in range(operations))
    (folder / f"adapters{operations}.yaml").write_text(f"interface:\n{adapters}")
    own = f"      $ref: ['adapters{operations}.yaml#/interface']\n" if shared else adapters
    parts = ["dfm: 1.0.0\ninfo: {api-version: 0.1.0, code-package: bench}\noperations:\n"]
    parts += [_OPERATION.format(n=n, module=n % 10) for n in range(operations)]
    parts.append("sites:\n")
    parts += [f"  site{site}:\n    interface:\n{own}" for site in range(SITES)]
    path = folder / f"{operations}{shared}.dfm.yaml"
    path.write_text("".join(parts))
    return path


async def _block(path: Path, operations: int) -> float:
    """Milliseconds of the processor: nothing is waited for, so that is what it takes."""
    start = time.process_time()
    federation = Federation.from_yaml(path)
    took = (time.process_time() - start) * 1e3
    assert sum(len(site.adapters) for site in federation.sites.values()) == operations * SITES
    return took


async def run(options: Options) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:

        def block(operations: int, shared: bool) -> Block:
            path = write(Path(folder), operations, shared=shared)
            return lambda: _block(path, operations)

        await block(10, True)()  # what reading needs is imported
        for name, shared, limit in (("shared", True, 1000), ("written out", False, 2000)):
            found = await interleave({str(n): block(n, shared) for n in SIZES}, options.repeats)
            metric = f"1,000 operations at 10 sites, adapters {name}"
            small = {"100 operations": found["100"]}
            figures.append(Figure(metric, "ms", found["1000"], {}, Target(limit)))
            figures.append(Figure(f"{metric}, growth", "ms", found["1000"], small, Target(15, "100 operations")))
    return figures


if __name__ == "__main__":
    main("federation_file", __doc__, run)
