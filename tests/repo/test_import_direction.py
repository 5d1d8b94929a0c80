"""Imports inside the package point one way, from what users call down to what kernels need.

The tables below are the rule. A module may import its own layer and those under it, at its top or inside a
function; imports for type checkers alone are free. The few exceptions are named where they are made.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = "anabranch"

LAYERS = (
    ("errors",),
    ("layout", "epilogues"),
    ("helper", "cases", "config", "tuning", "_backends"),
    ("reference", "backend"),
    ("dispatch",),
    ("call", "autograd"),
    ("api", "explain"),
    ("nn",),
    ("interop",),
    ("cli",),
)
LAYER = {kind: layer for layer, kinds in enumerate(LAYERS) for kind in kinds}

# Name below the package (a package's ends in a dot) -> kind, None: the first group. The first match counts.
KINDS = (
    (
        r"(errors|layout|epilogues|tuning|_backends|dispatch|explain|nn|interop|cli|testing)(\..*)?",
        None,
    ),
    (r"ops\.[a-z_]+\.backends\..*", "backend"),
    (r"ops\.positions\.builders", "reference"),  # its one implementation, which no dispatch chooses
    (r"ops\.grouped_gemm\.routed", "autograd"),  # a second operator, which routes too
    (r"ops\.[a-z_]+\.(reference|config|cases|call|autograd|api)\.?", None),
    (r"(ops\.([a-z_]+\.)?)?", "api"),  # the package, ops and an op's folder re-export the api
    (r"ops\.([a-z_]+\.)?[a-z_]+", "helper"),  # what several files of one op, or several ops, share
)

LEAVES = ("errors", "layout", "epilogues")
# The frozen call is the value that these are handed.
TAKES_A_CALL = ("backend", "reference", "config", "cases")
# Who may name a backend. Everyone else asks dispatch, which loads them by name.
NAMES_BACKENDS = ("dispatch", "backend", "cli")
USES_TESTING = r"(testing|cli\.bench|tuning\.check)(\..*)?"
DSL = {"gluon": "hopper"}  # plumbing named after its DSL rather than after the backend it serves
ALSO = {"hopper": "triton"}  # Gluon is Triton's: the hopper backends launch plain kernels beside their own


@dataclass(frozen=True)
class Module:
    """A module by its name below the package, which ends in a dot if the module is a package itself."""

    name: str

    @property
    def kind(self) -> str | None:
        for pattern, kind in KINDS:
            if match := re.fullmatch(pattern, self.name):
                return kind or match.group(1)
        return None

    @property
    def op(self) -> str | None:
        parts = self.name.split(".")
        return parts[1] if parts[0] == "ops" and len(parts) > 2 else None

    @property
    def dsl(self) -> str | None:
        match = re.match(r"(?:ops\.[a-z_]+\.backends|_backends)\.([a-z]+)", self.name)
        return DSL.get(match.group(1), match.group(1)) if match else None

    def __str__(self) -> str:
        return f"{PACKAGE}.{self.name}".rstrip(".")


@dataclass(frozen=True)
class Import:
    """One import statement between two modules of the package."""

    source: Module
    target: Module
    line: int
    lazy: bool


def refusal(edge: Import) -> str | None:
    """Why an import is not allowed, or None."""
    source, target = edge.source, edge.target
    for module in (source, target):
        if module.kind is None:
            return f"{module} has no place in KINDS; add it there"
    if target.kind == "testing":
        return (
            None
            if re.fullmatch(USES_TESTING, source.name)
            else "only tests, benchmarks, cli.bench and tuning.check use testing"
        )
    if source.kind == "testing":
        return None
    if source.kind == "layout" and edge.lazy and target.op == "route":
        return None  # its constructors call the op when they run
    if source.kind in LEAVES and target.kind not in ("errors", source.kind):
        return f"{source.kind} is a leaf: it imports errors alone"
    if (
        source.kind == "backend"
        and target.kind in ("backend", "_backends")
        and target.dsl not in (None, source.dsl, ALSO.get(source.dsl or ""))
    ):
        return f"a {source.dsl} backend imports no {target.dsl} code"
    if target.kind == "backend" and source.kind not in NAMES_BACKENDS:
        return "backends are chosen by dispatch, not imported"
    if source.kind in TAKES_A_CALL and target.kind == "call":
        return None
    if source.op == "moe_mlp" and target.op == "route" and source.kind != "backend":
        return None  # it routes before it multiplies
    if LAYER[source.kind] < LAYER[target.kind]:
        return (
            f"{source.kind} (layer {LAYER[source.kind]}) is below {target.kind} (layer {LAYER[target.kind]})"
        )
    return None


def imports(root: Path) -> Iterator[Import]:
    """Every import between modules of the package at ``root``."""
    paths = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
    for name, path in paths.items():
        for node, lazy in _runtime_nodes(ast.parse(path.read_text(), filename=str(path))):
            for target in _targets(node, name, set(paths)):
                yield Import(Module(name), Module(target), node.lineno, lazy)


def _name(path: Path, root: Path) -> str:
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return name.removesuffix("__init__") if path.name == "__init__.py" else name


def _runtime_nodes(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child, lazy
        yield from _runtime_nodes(child, lazy or isinstance(child, functions))


def _targets(node: ast.AST, source: str, modules: set[str]) -> list[str]:
    """The modules of the package that a node of the module ``source`` imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = f"{PACKAGE}.{source}".split(".")[: -node.level]
            base = ".".join([*parents, base]).rstrip(".")
        names = [f"{base}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
    else:
        names = []
    inside = [name[len(PACKAGE) + 1 :] for name in names if f"{name}.".startswith(f"{PACKAGE}.")]
    return list(dict.fromkeys(_module(name, modules) for name in inside))


def _module(name: str, modules: set[str]) -> str:
    """The module that a dotted name is, or is an attribute of."""
    while name and name not in modules:
        if f"{name}." in modules:
            return f"{name}."
        name = name.rpartition(".")[0]
    return name


def violations(root: Path) -> list[str]:
    return [
        f"{edge.source}:{edge.line} imports {edge.target}: {reason}"
        for edge in imports(root)
        if (reason := refusal(edge))
    ]


def test_imports_point_one_way():
    found = violations(SRC / PACKAGE)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "line", "reason"),
    [
        ("layout.py", "from anabranch.ops.route import api", "leaf"),
        ("epilogues/silu.py", "import anabranch.dispatch", "leaf"),
        ("dispatch.py", "from .ops.route.call import RouteCall", "below call"),
        ("ops/rope/backends/triton.py", "from anabranch.ops.route.backends import eager", "no eager code"),
        ("ops/rope/backends/triton.py", "from anabranch._backends.gluon import tma", "no hopper code"),
        ("ops/rope/backends/hopper.py", "from anabranch.ops.rope.backends import eager", "no eager code"),
        ("ops/rope/backends/eager.py", "from anabranch.ops.rope.api import rope", "below api"),
        ("ops/rope/api.py", "from .backends import eager", "chosen by dispatch"),
        ("ops/rope/call.py", "def f():\n    from anabranch import nn", "below nn"),
        ("ops/rope/call.py", "import importlib\nimportlib.import_module('anabranch.nn')", "below nn"),
        ("nn/moe.py", "from anabranch.testing import inputs", "use testing"),
        ("interop/peft.py", "from anabranch.cli import main", "below cli"),
        ("ops/checks.py", "from anabranch.ops import rope", "below api"),
        ("colours.py", "import anabranch", "no place in KINDS"),
    ],
)
def test_rejects(tmp_path, path, line, reason):
    _plant(tmp_path, path, line)
    (found,) = violations(tmp_path)
    assert reason in found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("layout.py", "def f():\n    from anabranch.ops.route import api"),
        ("dispatch.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from anabranch import nn"),
        ("ops/rope/backends/eager.py", "from anabranch.ops.route.backends import eager"),
        ("ops/rope/backends/eager.py", "from anabranch.ops.rope.call import RopeCall"),
        ("ops/rope/call.py", "from anabranch.ops import checks"),
        ("ops/rope/call.py", "from .. import checks"),
        ("ops/rope/__init__.py", "from .api import rope"),
        ("ops/moe_mlp/call.py", "from anabranch.ops.route import api"),
        ("ops/rope/backends/hopper.py", "from anabranch.ops.rope.backends import triton"),
        ("cli/bench/run.py", "from anabranch.testing import inputs"),
        ("tuning/check.py", "from anabranch.testing import inputs"),
        ("testing/inputs.py", "from anabranch.ops.rope.backends import triton"),
    ],
)
def test_accepts(tmp_path, path, line):
    _plant(tmp_path, path, line)
    assert violations(tmp_path) == []


def _plant(root: Path, path: str, line: str) -> None:
    """A package of the usual modules, all empty but for one line in one of them."""
    usual = """__init__.py dispatch.py layout.py nn/__init__.py testing/inputs.py cli/__init__.py
        ops/checks.py ops/route/api.py ops/route/call.py ops/route/backends/eager.py
        ops/rope/__init__.py ops/rope/api.py ops/rope/call.py ops/rope/backends/eager.py
        ops/rope/backends/triton.py _backends/gluon/tma.py"""
    for name in usual.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(line + "\n")
