"""Pipelines in DFM's own JSON, both variants: what nv_dfm_core writes and reads, and the older one.

A class name in such a file is a name and nothing else: it is looked up among the operations of the federation. Nothing
is imported because a pipeline names it.
"""

from __future__ import annotations

from dfm_async.federation.dfm_json.files import load_pipeline, parse_pipeline, save_pipeline
from dfm_async.federation.dfm_json.reading import read_pipeline
from dfm_async.federation.dfm_json.writing import write_pipeline

__all__ = ["load_pipeline", "parse_pipeline", "read_pipeline", "save_pipeline", "write_pipeline"]
