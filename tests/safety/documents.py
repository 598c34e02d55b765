"""Documents that try to do more than they may. Nothing here may lead to more than an error."""

from __future__ import annotations

import base64
import json
from typing import Any

from msgspec.msgpack import Ext, encode

HEAD = "dfm: 1.0.0\ninfo: {api-version: 0.1.0, code-package: m}\n"
MARK = "stolen"
"""What those who got through would leave behind: a file of this name, or a module."""

_LAUGHS = "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


def _offered(adapter: str, more: str = "") -> str:
    return HEAD + f"operations: {{a.B: {{}}}}\nsites: {{s: {{{more}interface: {{'#/operations/a.B': {adapter}}}}}}}\n"


FEDERATIONS: dict[str, str] = {
    "aliases that multiply": HEAD + "provision:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + _LAUGHS,
    "an alias inside itself": HEAD + "provision: &a {b: *a}\n",
    "a list inside itself": HEAD + "provision: {x: &a [*a, *a]}\n",
    "a merge of itself": HEAD + "provision: &a {<<: *a}\n",
    "brackets": HEAD + "provision: {a: " + "[" * 50_000 + "]" * 50_000 + "}\n",
    "a call by a tag": HEAD + f"provision: {{a: !!python/object/apply:os.system ['touch {MARK}']}}\n",
    "an object by a tag": HEAD + f"provision: !!python/object/new:subprocess.Popen [[touch, {MARK}]]\n",
    "a module by a tag": HEAD + "provision: {a: !!python/module:antigravity }\n",
    "a tag of its own": "!evil\n" + HEAD,
    "bytes": HEAD + "provision: {a: !!binary aGVsbG8=}\n",
    "a zero": HEAD + "provision: {a: \x00}\n",
    "half a character": HEAD + 'provision: {a: "\\ud800"}\n',
    "a number without end": HEAD + "provision: {a: " + "9" * 100_000 + "}\n",
    "a float beyond all": HEAD + "provision: {a: " + ":".join(["59"] * 3_000) + ".5}\n",
    "no numbers": HEAD + "sites: {a: {workers: .nan, threads: .inf, send_cost: {a: {fixed_time: .nan}}}}\n",
    "a reference to itself": HEAD + "operations: {a.B: {$ref: '#/operations/a.B'}}\n",
    "a merge that refers to itself": HEAD + "operations: {$ref: ['#/operations']}\n",
    "a reference into the system": HEAD + "operations: {$ref: ['../../../../../../../../etc/passwd#/']}\n",
    "a device": HEAD + "operations: {$ref: ['/dev/zero#/']}\n",
    "a folder": HEAD + "operations: {$ref: ['.#/']}\n",
    "a service": HEAD + "operations: {$ref: ['http://127.0.0.1:9/x#/']}\n",
    "a path with a zero": HEAD + 'operations: {$ref: ["a\\0b#/"]}\n',
    "schemas that multiply": HEAD
    + "provision:\n"
    + "".join(
        f"  s{n}: {{anyOf: [{{$ref: '#/provision/s{n + 1}'}}, {{$ref: '#/provision/s{n + 1}'}}]}}\n" for n in range(70)
    )
    + "  s70: {type: string}\noperations: {a.B: {parameters: {x: {$ref: '#/provision/s0'}}}}\n",
    "a pattern without end": HEAD + "operations: {a.B: {parameters: {x: {type: string, pattern: 'a{99999}{9999}'}}}}\n",
    "keys that are lists": HEAD + "sites: {[a]: {}}\n",
    "two documents": HEAD + "---\n" + HEAD,
    "another YAML": "%YAML 9.9\n---\n" + HEAD,
    "a command as adapter": _offered("{adapter: os.system}"),
    "a process as adapter": _offered(f"{{adapter: {{path: subprocess.Popen, args: {{args: [touch, {MARK}]}}}}}}"),
    "a builtin as adapter": _offered("{adapter: builtins.exec}"),
    "a process as site": HEAD
    + f"sites: {{s: {{impl: {{path: subprocess.Popen, args: {{args: [touch, {MARK}]}}}}}}}}\n",
    "a process as vault": HEAD + "sites: {s: {secrets_vault: {path: subprocess.Popen}}}\n",
    "globals of the site": _offered("{adapter: m.lib.A, args: {x: {from-site: __class__.__init__.__globals__}}}"),
    "code in a name": HEAD + f"operations: {{\"a.B(__import__('os').system('touch {MARK}'))\": {{}}}}\n",
    "code in a parameter": HEAD + 'operations: {a.B: {parameters: {"x=open(1)": {type: string}}}}\n',
    "code in a type": HEAD + "operations: {a.B: {parameters: {x: {type: \"__import__('os')\"}}}}\n",
}
"""Files that are refused."""

LAZY: dict[str, str] = {
    "classes that are not there": _offered("{adapter: stolen.lib.Adapter}", "impl: stolen.Site, "),
    "a model that is not there": HEAD
    + "operations: {a.B: {parameters: {x: {type: stolen.Model}}, returns: stolen.M}}\n",
    "a module with a joke": _offered("{adapter: stolen.antigravity.Joke, args: {x: {const: null}}}"),
}
"""Files that are fine as far as anybody can tell who imports nothing."""


def call(class_name: str, **more: Any) -> dict[str, Any]:
    """A statement of DFM's JSON."""
    return {"dfm_class_name": class_name, "dfm_node_id": {"tag": "@dfm-node", "ident": 0}, "dfm_after": None, **more}


def dfm(*body: Any, **more: Any) -> str:
    """A pipeline of DFM's JSON."""
    return json.dumps({"api_version": "", "mode": "execute", "name": None, "dfm_body": list(body), **more})


_REF = {"id": {"tag": "@dfm-node", "ident": 0}, "sel": "__class__", "issubs": False}
_PICKLE = base64.b64encode(b"cos\nsystem\n(S'touch stolen'\ntR.").decode()
_NOT = '{"operator": "not", "exp": '
_IF = '{"dfm_class_name": "nv_dfm_core.api.If", "dfm_node_id": {"tag": "@dfm-node", "ident": 1}, "cond": '

DFM_PIPELINES: dict[str, str] = {
    "a command": dfm(call("os.system", command=f"touch {MARK}")),
    "a process": dfm(call("subprocess.Popen", args=["touch", MARK])),
    "a module": dfm(call("stolen.fed.api.mod.Op")),
    "a class of ours": dfm(call("dfm_async.Session")),
    "a class of theirs": dfm(call("nv_dfm_core.api.PreparedPipeline")),
    "no text": dfm(call(["nv_dfm_core.api.Yield"])),  # type: ignore[arg-type]
    "Python's inside": dfm(call("nv_dfm_core.api.Yield", value=_REF)),
    "a pickle": dfm(call("nv_dfm_core.api.Yield", value={"tag": "__dfm__pickled__", "data": _PICKLE})),
    "conditions without end": '{"dfm_body": ['
    + _IF
    + '{"operator": "not", "exp": ' * 20_000
    + "1"
    + "}" * 20_002
    + "]}",
    "blocks without end": '{"dfm_body": [' + (_IF + '1, "dfm_body": [') * 5_000 + "]}" * 5_000 + "]}",
    "half a character": '{"name": "\\ud800", "dfm_body": []}',
    "no number": '{"dfm_body": NaN}',
    "a number without end": '{"dfm_body": [' + "9" * 100_000 + "]}",
}
"""Pipelines that are refused."""


def service(operation: Any, **more: Any) -> dict[str, Any]:
    """An OpenAPI document with one operation."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "s", "version": "1"},
        "servers": [{"url": "http://127.0.0.1:9"}],
        "paths": {"/x": {"get": operation}},
        **more,
    }


def _parameter(schema: Any, **more: Any) -> dict[str, Any]:
    return service(
        {"operationId": "get", "parameters": [{"name": "q", "in": "query", "schema": schema}]}, components=more
    )


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


_TWICE = {
    f"S{n}": {"anyOf": [{"$ref": f"#/components/other/S{n + 1}"}] * 2} if n < 70 else {"type": "string"}
    for n in range(71)
}

_ITSELF = {"$ref": "#/components/schemas/S"}

SERVICES: dict[str, Any] = {
    "nothing": {},
    "a reference to itself": service({"$ref": "#/paths/~1x/get"}),
    "a parameter that refers to itself": service(
        {"operationId": "get", "parameters": [{"$ref": "#/paths/~1x/get/parameters/0"}]}
    ),
    "a schema that is itself": _parameter(_ITSELF, schemas={"S": _ITSELF}),
    "schemas that multiply": _parameter({"$ref": "#/components/other/S0"}, other=_TWICE),
    "schemas without end": _parameter(_deep(500)),
    "a file of the system": service({"$ref": "../../../../../../../../etc/passwd#/"}),
    "a device": service({"$ref": "/dev/zero#/"}),
    "another service": service({"$ref": "http://127.0.0.1:9/x#/"}),
    "code as an id": service({"operationId": f"__import__('os').system('touch {MARK}')"}),
    "code as a parameter": service(
        {"operationId": "get", "parameters": [{"name": "x=open(1)", "in": "query", "schema": {"type": "string"}}]}
    ),
    "a pattern without end": _parameter({"type": "string", "pattern": "a{99999}{9999}"}),
    "a place that is none": service({"operationId": "get", "parameters": [{"name": "q", "in": "kernel"}]}),
    "an address that is none": {**service({"operationId": "get"}), "servers": [{"url": "file:///etc/passwd"}]},
}
"""Documents of services: each is refused, or gives operations that nobody has called yet."""


def _nested(depth: int) -> bytes:
    data = encode([])
    for _ in range(depth):
        data = encode([Ext(1, data)])
    return data


VALUES: dict[str, bytes] = {
    "a pickle": encode(Ext(23, b"cos\nsystem\n(S'touch stolen'\ntR.")),
    "a pickle with buffers": encode(Ext(25, encode([b"cos\nsystem\n(S'touch stolen'\ntR.", []]))),
    "a process": encode(Ext(13, encode(["subprocess:Popen", {"args": ["touch", MARK]}]))),
    "a module that is not loaded": encode(Ext(12, encode(["antigravity:Joke", 1]))),
    "an enum that is none": encode(Ext(12, encode(["subprocess:Popen", ["touch", MARK]]))),
    "a struct that is none": encode(Ext(15, encode(["subprocess:Popen", ["touch", MARK]]))),
    "a model that is none": encode(Ext(14, encode(["subprocess:Popen", {"__dict__": {}}]))),
    "a tuple that is none": encode(Ext(16, encode(["subprocess:Popen", ["touch", MARK]]))),
    "a path that is none": encode(Ext(18, encode(["subprocess:Popen", ["touch", MARK]]))),
    "lists without end": b"\x91" * 100_000 + b"\x90",
    "tuples without end": _nested(2_000),
    "a length without data": b"\xdd\xff\xff\xff\xff",
    "a mapping without data": b"\xdf\xff\xff\xff\xff",
    "an array of objects": encode(Ext(21, encode(["O", [1], b"12345678"]))),
    "an array without data": encode(Ext(21, encode(["<f8", [2**31, 2**31], b""]))),
    "an unknown extension": encode(Ext(99, b"")),
    "nothing": b"",
}
"""Values that are refused."""
