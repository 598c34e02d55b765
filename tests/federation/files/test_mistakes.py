"""Every mistake is reported with its place and what is allowed there; all of them at once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dfm_async import Federation, Session
from dfm_async.errors import FederationError
from tests.federation.files.rig import HEAD, loaded, problems, written

OPERATIONS = """\
operations:
  math.Add: {parameters: {x: {type: number}, y: {type: number}}, required: [x], returns: number}
"""


def interface(adapter: str, more: str = "") -> str:
    return f'{OPERATIONS}sites:\n  a:\n    interface:\n      "#/operations/math.Add": {adapter}\n{more}'


def bound(binding: str) -> str:
    return interface(f"{{adapter: pkg.Add, args: {{x: {binding}}}}}", "    providers: {acme: {}}\n")


MISTAKES = {
    # the whole
    "sitez: {}": "3:1 sitez: a federation has no key 'sitez' (did you mean 'sites'?)",
    "operations: []": "3:13 operations: operations must be a mapping, not a list",
    "provision: 3": "3:12 provision: provision must be a mapping, not 3",
    "sites: {}\nsites: {}": "4:1 sites: duplicate key 'sites', first in line 3",
    "sites: {a: {}, b: {info: {x: [1, {y: 1, y: 2}]}}}": "sites.b.info.x[1].y: duplicate key 'y'",
    # operations
    "operations: {1x: {returns: object}}": "3:18 operations['1x']: an operation's name must be identifiers with dots",
    "operations: {a.B: {retruns: object}}": "3:20 operations['a.B'].retruns: an operation has no key 'retruns'",
    "operations: {a.B: {returns: 'a b'}}": "3:29 operations['a.B'].returns: returns must name a type",
    "operations: {a.B: {type: string}}": "operations['a.B'].type: the type of an operation can only be object",
    "operations: {a.B: {parameters: {x-y: {}}}}": "operations['a.B'].parameters.x-y: a parameter's name must be an",
    "operations: {a.B: {parameters: {class: {}}}}": "parameters.class: a parameter's name must be an identifier",
    "operations: {a.B: {parameters: {site: {}}}}": "parameters.site: a parameter cannot be named 'site': that argument",
    "operations: {a.B: {parameters: {x: string}}}": "parameters.x: a schema must be a mapping, such as {type: number}",
    "operations: {a.B: {parameters: {x: {type: strng}}}}": "x.type: unknown type 'strng' (did you mean 'string'?)",
    "operations: {a.B: {parameters: {x: {type: [string, 3]}}}}": "x.type[1]: type must be text, not 3",
    "operations: {a.B: {parameters: {x: {type: []}}}}": "x.type: type must name at least one type",
    "operations: {a.B: {parameters: {x: {enum: []}}}}": "x.enum: enum must list at least one value",
    "operations: {a.B: {parameters: {x: {minimun: 3}}}}": "x.minimun: a schema has no key 'minimun'",
    "operations: {a.B: {parameters: {x: {minimum: low}}}}": "x.minimum: minimum must be a number, not 'low'",
    "operations: {a.B: {parameters: {x: {multipleOf: 0}}}}": ("x.multipleOf: multipleOf must be positive, not 0"),
    "operations: {a.B: {parameters: {x: {maxLength: -1}}}}": "x.maxLength: maxLength must not be negative, not -1",
    "operations: {a.B: {parameters: {x: {pattern: '(?=a)'}}}}": "x.pattern: '(?=a)' is not a pattern that can be",
    "operations: {a.B: {parameters: {x: {type: integer, default: 'a'}}}}": (
        "x.default: the default 'a' is not of type integer"
    ),
    "operations: {a.B: {parameters: {x: {type: integer, default: true}}}}": "the default True is not of type integer",
    "operations: {a.B: {parameters: {x: {discoverable: maybe}}}}": "x.discoverable: discoverable must be true or false",
    (
        "operations: {a.B: {parameters: {x: {accepts-literal-input: false, accepts_node_input: false, "
        "accepts-place-input: false}}}}"
    ): "x: this parameter accepts no input: set one of",
    # schemas
    "schemas: {1x: {type: object}}": "schemas['1x']: a schema's name must be identifiers with dots",
    "schemas: {m.A: 3}": "3:16 schemas['m.A']: a schema must be a mapping, such as {type: number}, not 3",
    "schemas: {m.A: {properties: {x: {type: nmber}}}}": "schemas['m.A'].properties.x.type: unknown type 'nmber'",
    "schemas: {m.A: {accepts-node-input: true}}": "schemas['m.A'].accepts-node-input: a schema has no key",
    # sites
    "sites: {a b: {}}": "sites['a b']: a site's name must be an identifier, or identifier@domain, not 'a b'",
    "sites: {a@: {}}": "a site's name must be an identifier, or identifier@domain, not 'a@'",
    "sites: {a: {}, a@x.org: {}}": "sites['a@x.org']: duplicate site 'a': the part after @ does not count",
    "sites: {a: {cache: {}}}": "sites.a.cache: a site has no key 'cache'",
    "sites: {a: {impl: Site}}": "sites.a.impl: 'Site' is not a path of a class: use its module and its name, such as",
    "sites: {a: {impl: {args: {}}}}": "sites.a.impl: impl needs 'path'",
    "sites: {a: {impl: {path: pkg.Site, arg: {}}}}": "sites.a.impl.arg: impl has no key 'arg' (did you mean 'args'?)",
    "sites: {a: {impl: {path: pkg.Site, args: [1]}}}": "sites.a.impl.args: args must be a mapping, not a list",
    "sites: {a: {impl: {path: pkg.Site, args: {x y: 1}}}}": "an argument's name must be an identifier",
    "sites: {a: {impl: subprocess.Popen}}": "sites.a.impl: 'subprocess.Popen' belongs to the standard library",
    "sites: {a: {cache_config: {protocoll: file}}}": "cache_config has no key 'protocoll' (did you mean 'protocol'?)",
    "sites: {a: {cache_config: {protocol: s3}}}": "sites.a.cache_config: a cache on 's3' needs a base_path",
    "sites: {a: {cache_config: {max_bytes: 0}}}": "cache_config.max_bytes: max_bytes must be positive, not 0",
    "sites: {a: {cache_config: {max_age: often}}}": "cache_config.max_age: max_age must be a number, not 'often'",
    "sites: {a: {cache_config: {storage_options: 3}}}": "storage_options: storage_options must be a mapping, not 3",
    "sites: {a: {secrets_vault: {path: attic}}}": "secrets_vault.path: 'attic' is not a path of a class",
    "sites: {a: {secrets_vault: {path: os.environ}}}": "secrets_vault.path: 'os.environ' belongs to",
    "sites: {a: {send_cost: {b: {}}}}": "3:25 sites.a.send_cost.b: unknown site 'b'; known: a",
    "sites: {a: {send_cost: {a: {fixed: 1}}}}": "a send cost has no key 'fixed' (did you mean 'fixed_time'?)",
    "sites: {a: {send_cost: {a: {bandwidth: 0}}}}": "bandwidth: bandwidth must be positive, not 0",
    "sites: {a: {send_cost: {a: {fixed_time: -1}}}}": "fixed_time: fixed_time must not be negative, not -1",
    **{
        f"sites: {{a: {{send_cost: {{a: {{fixed_time: {number}}}}}}}}}": "fixed_time must be a number, not"
        for number in ("9" * 400, "-.inf", ".nan", "1.0e+300")
    },
    f"provision: {{a: {'9' * 10_000}}}": "invalid int",
    "sites: {a: {workers: 0}}": "sites.a.workers: workers must be positive, not 0",
    "sites: {a: {workers: [8, 1]}}": "sites.a.workers: workers must be a whole number, or the smallest and the largest",
    "sites: {a: {workers: [1, 2, 3]}}": "or the smallest and the largest one as in [1, 8]",
    "sites: {a: {workers: [1, x]}}": "sites.a.workers[1]: workers must be a whole number, not 'x'",
    "sites: {a: {idle_after: -1}}": "sites.a.idle_after: idle_after must not be negative, not -1",
    "sites: {a: {threads: 1.5}}": "sites.a.threads: threads must be a whole number, not 1.5",
    "sites: {a: {providers: {p-q: {}}}}": "providers.p-q: a provider's name must be an identifier, not 'p-q'",
    "sites: {a: {providers: {p: {vault: {}}}}}": "providers.p.vault: a provider has no key 'vault'",
    # adapters
    f"{OPERATIONS}sites: {{a: {{interface: {{math.Add: {{adapter: p.Add}}}}}}}}": (
        "sites.a.interface['math.Add']: an interface has keys such as '#/operations/array.Create', not 'math.Add'"
    ),
    f"{OPERATIONS}sites: {{a: {{interface: {{'#/operations/math.Ad': {{adapter: p.Add}}}}}}}}": (
        "unknown operation 'math.Ad'; did you mean 'math.Add'? Known: math.Add"
    ),
    interface("{}"): "an adapter needs 'adapter': the path of its class, or {path: ..., args: {...}}",
    interface("{adapter: pkg.Add, arguments: {}}"): "an adapter has no key 'arguments'",
    interface("{adapter: os.system}"): "'os.system' belongs to the standard library",
    interface("{adapter: 3}"): "adapter: adapter must be text, not 3; put it in quotes",
    interface("{adapter: pkg.Add, is-async: 'yes'}"): "is-async: is-async must be true or false, not 'yes'",
    interface(
        "{adapter: pkg.Add, is-async: true, is_async: true}"
    ): "is_async: duplicate key, also written as 'is-async'",
    interface("{adapter: pkg.Add, args: from-operations}"): "args must be 'from-operation' or a mapping, not",
    interface("{adapter: pkg.Add, returns: 'a b'}"): "returns: returns must name a type",
    interface("{adapter: pkg.Add, compute_cost: {time: 1}}"): "compute_cost has no key 'time'",
    interface(
        "{adapter: pkg.Add, compute_cost: {compute_throughput: 0}}"
    ): "compute_throughput must be positive, not 0",
    interface("{adapter: pkg.Add, compute_cost: {fixed_size: .nan}}"): "fixed_size must be a number, not nan",
    interface("{adapter: pkg.Add, deadline: 0}"): "deadline: deadline must be positive, not 0",
    interface("{adapter: pkg.Add, retry: {attempts: 0}}"): "retry.attempts: attempts must be positive, not 0",
    # bindings
    bound("[1]"): "args.x: a list must be written as {const: [...]}",
    bound("{}"): "args.x: a binding has one of from-param, const, from-secrets, from-site, from-provider, not none",
    bound("{const: 1, from-site: a}"): "from-provider, not const and from-site",
    bound("{from-parm: x}"): "args.x.from-parm: a binding has no key 'from-parm' (did you mean 'from-param'?)",
    bound("{from-param: z}"): "args.x.from-param: the operation has no parameter 'z'; known: x, y",
    bound("{from-param: x, expose-as: {param: z, type: number}}"): "expose-as cannot be combined with from-param",
    bound(
        "{from-provider: acme}"
    ): "from-provider names a provider and its attribute, such as acme.base_url, not 'acme'",
    bound("{from-provider: acne.unit}"): "the site has no provider 'acne'; did you mean 'acme'? Known: acme",
    bound("{from-provider: acme.__dict__}"): "'__dict__' is an attribute of Python's own",
    bound("{from-site: __class__}"): "'__class__' is an attribute of Python's own; name one of the object's",
    bound("{from-site: a.b}"): "from-site must be an identifier, such as 'rain_2m', not 'a.b'",
    bound("{from-secrets: [a]}"): "from-secrets must be text, not a list",
    bound("{const: 1, expose-as: {type: number}}"): "expose-as needs 'param'",
    bound("{const: 1, expose-as: {param: retry, type: number}}"): "'retry' means something else in a pipeline",
    bound("{const: 1, expose-as: {param: p, type: nmber}}"): "unknown type 'nmber' (did you mean 'number'?)",
    bound("{const: 1, expose-as: {param: p, typ: number}}"): "expose-as has no key 'typ' (did you mean 'type'?)",
    bound("{const: 1, expose-as: {param: p}}, y: {const: 2, expose-as: {param: p}}"): (
        "args.y: the argument 'x' is exposed as 'p' already"
    ),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_reported_where_it_is(text: str, tmp_path: Path) -> None:
    found = problems(tmp_path, text)
    assert len(found) == 1, found
    assert MISTAKES[text] in found[0]


HEADS = {
    "info: {api-version: 0.1.0, code-package: a}": "1:1 : 'dfm' is missing: the version of the format, 1.0.0",
    "dfm: 2.0.0\ninfo: {api-version: 0.1.0, code-package: a}": "1:6 dfm: dfm must be 1.0.0",
    "dfm: 1.0.0": "1:1 : 'info' is missing: it has api-version and code-package",
    "dfm: 1.0.0\ninfo: [a]": "2:7 info: info must be a mapping, not a list",
    "dfm: 1.0.0\ninfo: {code-package: a}": "2:7 info: 'api-version' is missing",
    "dfm: 1.0.0\ninfo: {api-version: 0.1.0}": "2:7 info: 'code-package' is missing",
    "dfm: 1.0.0\ninfo: {api-version: 1.0, code-package: a}": "info.api-version: api-version must be three numbers",
    "dfm: 1.0.0\ninfo: {api_version: 1.0.x, code-package: a}": (
        "api-version must be three numbers, such as 0.1.0, not '1.0.x'"
    ),
    "dfm: 1.0.0\ninfo: {api-version: 0.1.0, code-package: a-b}": (
        "code-package must be an identifier, such as 'rain_2m'"
    ),
    "dfm: 1.0.0\ninfo: {api-version: 0.1.0, code-package: a, code_package: b}": "duplicate key, also written as",
    "dfm: 1.0.0\ninfo: {api-version: 0.1.0, code-package: a, description: 3}": "description must be text, not 3",
    "": "1:1 : the file is empty; it must be a mapping with the keys dfm, info, provision, schemas, operations, sites",
    "- a": "1:1 : the file holds a list; it must be a mapping",
    "a: [": "this is not YAML: did not find expected node content",
    "a: b: c": "1:5 : this is not YAML: mapping values are not allowed",
    "a: \x07": "this is not YAML: ",
    "a: b\n---\nc: d": "2:1 : a second document begins here; a file must contain one",
    "a: !!python/object/apply:os.system [echo]": "1:4 : the tag !!python/object/apply:os.system is not allowed",
    "a: !!binary aGk=": "the tag !!binary is not allowed",
    "a: !mine 3": "1:4 : tags are not allowed; put text that begins with ! in quotes",
    "a: !!int b": "1:4 : invalid int: 'b'",
    "a: *b": "1:4 : no such anchor before this alias; put text that begins with * in",
    "a: &b [*b]": "1:8 : the alias *b refers to a part of the file that contains it",
    "? [a]\n: b": "1:3 : a key must be text, not a list or a mapping",
    "a: &b {c: d}\n? *b\n: e": "a key must be text, not an alias",
    "<<: 3": "<<: takes an alias of a mapping, or a list of them",
}


@pytest.mark.parametrize("head", HEADS)
def test_a_mistake_at_the_top_is_reported(head: str, tmp_path: Path) -> None:
    found = problems(tmp_path, "", head=head)
    assert len(found) == 1, found
    assert HEADS[head] in found[0]


def test_all_mistakes_are_reported_at_once_over_several_files(tmp_path: Path) -> None:
    text = """\
        info: {api-version: 0.1.0, code-package: small, code-package: other}
        operations:
          math.Add: {parameters: {x: {type: nmber}}, returns: number}
          $ref: ["parts/more.yaml#/operations"]
        sites:
          a: {impl: os.Site, send_cost: {c: {}}}
          b: {$ref: "parts/sites.yaml#/b"}
    """
    found = problems(
        tmp_path,
        text,
        head="dfm: 1.0.0\n",
        parts_more="operations:\n  math.Sub:\n    required: z\n",
        parts_sites="b:\n  interface:\n    '#/operations/math.Mul': {adapter: 3}\n",
    )
    assert [problem.partition(" ")[0] for problem in found] == [
        "2:49",
        "4:37",
        "7:13",
        "7:34",
        "parts/more.yaml:3:15",
        "parts/sites.yaml:3:30",
        "parts/sites.yaml:3:40",
    ]


def test_a_required_parameter_that_is_not_there_is_a_warning_as_dfm_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "operations: {a.B: {parameters: {state: {}, x: {}}, required: [stat, x], returns: object}}\n"
    federation = loaded(tmp_path, text)
    assert str(federation.operations.a.B.signature.parameters) == "(x, *, state=None)"
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path / 'federation.dfm.yaml'}:3:63: operations['a.B'].required[0]: the operation has no parameter "
        "'stat', so it is ignored; did you mean 'state'? Known: state, x"
    )


def test_the_error_is_complete_and_can_be_pickled(tmp_path: Path) -> None:
    path = written(tmp_path, "sitez: {}\nsites: {a b: {}}\n")
    with pytest.raises(FederationError, match=r"has 2 problems:\n  - .*federation.dfm.yaml:3:1: sitez: ") as caught:
        Federation.from_yaml(path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert [problem.key for problem in again.problems] == ["sitez", "sites['a b']"]


def test_many_mistakes_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    path = written(tmp_path, "sites: {" + ", ".join(f"{number}: {{}}" for number in range(70)) + "}")
    with pytest.raises(FederationError, match="has 70 problems") as caught:
        Federation.from_yaml(path)
    assert len(caught.value.problems) == 70
    assert str(caught.value).endswith("\n  and 20 more")


def test_a_file_that_is_not_there_is_a_federation_error(tmp_path: Path) -> None:
    for path, message in [
        (tmp_path / "none.yaml", "none.yaml: cannot be read: the file does not exist"),
        (tmp_path, f"{tmp_path}: is not a file, but a folder"),
        (tmp_path / "a\0b", "cannot be read: "),
    ]:
        with pytest.raises(FederationError, match=message):
            Federation.from_yaml(path)
    with pytest.raises(FederationError, match="the file does not exist"):
        Session(str(tmp_path / "none.yaml"))


def test_a_file_must_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(HEAD.encode() + "provision: {a: \xe9}".encode("latin-1"))
    with pytest.raises(FederationError, match=r"latin.yaml:3:16: this is not UTF-8 text"):
        Federation.from_yaml(path)


def test_what_may_be_a_secret_is_not_shown(tmp_path: Path) -> None:
    text = "sites: {a: {secrets_vault: {args: hunter2}, cache_config: {storage_options: hunter2}}}"
    found = problems(tmp_path, text)
    assert len(found) == 2
    assert "hunter2" not in str(found)
    for sign in "*!":  # they mean something else in YAML
        assert "hunter2" not in str(
            problems(tmp_path, f"sites: {{a: {{secrets_vault: {{args: {{x: {sign}hunter2}}}}}}}}")
        )
    path = written(tmp_path, "sites: {a: {secrets_vault: {args: {prefix: hunter2}}}}")
    federation = Federation.from_yaml(path)
    assert "hunter2" not in repr(federation.sites["a"].vault) + repr(federation.sites["a"].config("home"))


def test_packages_narrow_where_classes_come_from(tmp_path: Path) -> None:
    path = written(tmp_path, interface("{adapter: pkg.lib.Add, args: from-operation}", "    impl: other.Site\n"))
    assert Federation.from_yaml(path, packages=("pkg", "other")).packages == ("pkg", "other")
    with pytest.raises(
        FederationError, match=r"'other\.Site' is of no package that the federation allows \(it allows: pkg\.lib\)"
    ):
        Federation.from_yaml(path, packages=("pkg.lib",))
    with pytest.raises(FederationError, match="has 2 problems"):
        Federation.from_yaml(path, packages=())
    with pytest.raises(TypeError, match=r"packages must be a tuple of names, such as \('pkg',\)"):
        Federation.from_yaml(path, packages="pkg")  # type: ignore[arg-type] # a slip that is easily made


def test_a_relative_path_that_does_not_exist_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FederationError) as caught:
        Federation.from_yaml("configs/none.yaml")
    message = f"configs/none.yaml: cannot be read: the file does not exist. The program runs in {tmp_path}"
    assert str(caught.value) == message


def test_keys_are_listed_as_files_write_them(tmp_path: Path) -> None:
    text = """
    operations: {a.B: {}}
    sites: {s: {interface: {"#/operations/a.B": {adapter: pkg.B, args: {x: {from-parm: y}}}}}}
    """
    assert "Allowed are: from-param, const, from-secrets" in problems(tmp_path, text)[0]
