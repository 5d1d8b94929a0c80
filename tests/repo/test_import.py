"""``import anabranch`` needs torch and the standard library, and leaves the process as it found it.

Each test runs in a fresh process where optional packages cannot be imported.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

PRELUDE = """
import sys

class Blocker:
    asked = []
    names = {"triton", "transformers", "peft", "torchtitan", "typer", "rich", "matplotlib", "safetensors"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            self.asked.append(name)
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import torch
Blocker.asked.clear()
"""

QUIET = """
import logging, os, warnings

def state():
    named = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]
    return {
        "environment": set(os.environ.items()),
        "warning filters": {str(entry) for entry in warnings.filters},
        "log handlers": {(logger.name, handler) for logger in loggers for handler in logger.handlers},
        "log levels": {(logger.name, logger.level) for logger in loggers if logger.level},
        "default dtype": {torch.get_default_dtype()},
        "threads": {torch.get_num_threads()},
        "random state": {str(torch.get_rng_state().tolist())},
        "packages": {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names,
    }

before = state()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import anabranch
after = state()
after["packages"].discard("anabranch")

assert not caught, [str(w.message) for w in caught]
assert not Blocker.asked, f"asked for {Blocker.asked}"
assert not torch.cuda.is_initialized(), "initialised CUDA"
for what, value in before.items():
    assert after[what] == value, f"changed {what}: {after[what] ^ value}"
"""

# Every module but those that exist to use an optional package.
ALL = """
import importlib, pkgutil
import anabranch

optional = ("cli", "interop", "_backends.triton", "_backends.hopper")
optional += ("epilogues.device", "testing.aot", "testing.device_functions")
optional = tuple(f"anabranch.{name}" for name in optional)
for module in pkgutil.walk_packages(anabranch.__path__, "anabranch.", onerror=lambda name: None):
    if module.name.startswith(optional) or module.name.split(".")[-1] in ("triton", "hopper"):
        continue
    if ".backends.triton." in module.name or ".backends.hopper." in module.name:
        continue
    importlib.import_module(module.name)
assert not torch.cuda.is_initialized(), "initialised CUDA"
"""


@pytest.mark.parametrize("script", [pytest.param(QUIET, id="package"), pytest.param(ALL, id="every-module")])
def test_torch_is_enough(script):
    code = f"import sys; sys.path.insert(0, {str(SRC)!r})\n{PRELUDE}\n{script}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert "anabranch" not in result.stderr, result.stderr


def test_subpackages_are_imported_when_they_are_asked_for():
    code = """
import sys, anabranch
assert "anabranch.nn" not in sys.modules
assert anabranch.nn is sys.modules["anabranch.nn"]
assert anabranch.interop is sys.modules["anabranch.interop"]
try:
    anabranch.layers
except AttributeError as error:
    assert "layers" in str(error)
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SRC)})
