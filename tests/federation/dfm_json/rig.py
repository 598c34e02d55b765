"""A federation as its file would say it, and pieces of DFM's JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dfm_async import Federation
from dfm_async.federation import Const, ExposedParameter, FromParam
from dfm_async.federation.bindings import Binding

DATA = Path(__file__).parent / "data"


class Greet:
    """Has one argument more than the operation, which the site binds."""

    def body(self, name: str, n: int = 3, opt: str | None = None, greeting: str = "hi") -> str:
        return f"{greeting} {name}" * (1 if opt is None else n)


class Square:
    def body(self, x: float) -> float:
        return math.pow(x, 2)


def minifed() -> Federation:
    """Two operations, one of them with an extra parameter at one site and with a provider."""
    federation = Federation("minifed", api_version="0.1.0")

    def greet_me(name: str, n: int = 3, opt: str | None = None) -> str:
        raise NotImplementedError

    def square(x: Any) -> float:
        raise NotImplementedError

    federation.declare("users.GreetMe", greet_me)
    federation.declare("deep.math.Square", square)
    alpha = federation.site("alpha")
    exposed = ExposedParameter(param="greeting", type="string", description="the greeting")
    bind: dict[str, Binding] = {"name": FromParam("name"), "greeting": Const("hi", expose_as=exposed)}
    alpha.adapt("users.GreetMe", Greet, bind=bind)
    alpha.adapt("users.GreetMe", Greet, provider="prov")
    alpha.adapt("deep.math.Square", Square)
    federation.site("beta").adapt("deep.math.Square", Square)
    return federation


def node(ident: Any) -> dict[str, Any]:
    return {"tag": "@dfm-node", "ident": ident}


def ref(ident: Any, sel: Any = None, issubs: bool = True) -> dict[str, Any]:
    return {"id": node(ident), "sel": sel, "issubs": issubs}


def statement(class_name: str, ident: Any, **keys: Any) -> dict[str, Any]:
    return {"dfm_class_name": class_name, "dfm_node_id": node(ident), "dfm_after": None, **keys}


def square(ident: Any, x: Any = 2, **keys: Any) -> dict[str, Any]:
    return statement("minifed.fed.api.deep.math.Square", ident, x=x, **keys)


def core(name: str, ident: Any, **keys: Any) -> dict[str, Any]:
    return statement(f"nv_dfm_core.api.{name}", ident, **keys)


def pipeline(*statements: Any, **keys: Any) -> dict[str, Any]:
    return {"api_version": "0.1.0", "mode": "execute", "name": None, "dfm_body": list(statements), **keys}
