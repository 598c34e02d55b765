"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["CompatOption", "FederationArgument", "JsonOption"]

FederationArgument = Annotated[
    str,
    typer.Argument(
        metavar="FEDERATION",
        help="package.module:name, file.py[:name], or a federation file (.yaml).",
        show_default=False,
    ),
]
CompatOption = Annotated[
    bool, typer.Option("--compat", help="For a federation file: provide what adapters import of nv_dfm_core.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON lines.")]
