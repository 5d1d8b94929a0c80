"""examples/vla_block.py: a block of the drop-in names alone, equal to plain PyTorch, and trainable."""

import ast
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "vla_block.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("vla_block", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vla_block"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["vla_block"]


def test_equals_plain_pytorch(example, device):
    assert example.compare(device) < 1e-12


def test_a_wrong_rotation_is_seen(example, monkeypatch):
    monkeypatch.setattr(example.ops, "multimodal_rope", lambda q, k, *rest: (q, k))
    assert example.compare() > 1e-3


def test_trains_the_action_expert_alone(example, device):
    losses = example.train(device)
    assert losses[-1] < losses[0] / 10
    assert all(torch.isfinite(torch.tensor(losses)))


def test_imports_the_drop_in_alone():
    nodes = ast.walk(ast.parse(PATH.read_text()))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.startswith("anabranch")} == {"anabranch.interop.wallx"}


def test_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(PATH)])
    runpy.run_path(str(PATH), run_name="__main__")
    assert "in 30 steps" in capsys.readouterr().out
