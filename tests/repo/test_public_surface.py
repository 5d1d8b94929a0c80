"""The public names are these; adding or removing one is a decision, made here."""

import inspect
import re
from pathlib import Path

import pytest
import tomllib

import anabranch

ROOT = Path(__file__).parents[2]

FUNCTIONS = (
    "dual_gemm",
    "explain",
    "grouped_gemm",
    "moe_mlp",
    "mrope",
    "multi_gemm",
    "permute",
    "rope",
    "rope_index",
    "topk_router",
    "unpermute",
    "vision_rotary",
    "window_index",
)
ERRORS = {
    "ArgumentError": ValueError,
    "ArgumentTypeError": TypeError,
    "UnsupportedError": NotImplementedError,
}
CONSTRUCTORS = ("from_topk", "from_counts", "from_sorted", "from_slot_to_row")


def test_names_are_frozen():
    assert sorted(anabranch.__all__) == sorted((*FUNCTIONS, *ERRORS, "ExpertLayout"))


@pytest.mark.parametrize("name", [*FUNCTIONS, *ERRORS, "ExpertLayout"])
def test_exists_and_is_documented(name):
    assert inspect.getdoc(getattr(anabranch, name))


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_usual_ones(name):
    assert issubclass(getattr(anabranch, name), ERRORS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_names_each_parameter(name):
    _check_docstring(getattr(anabranch, name))


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_layout_constructors_are_documented(name):
    assert inspect.getdoc(getattr(anabranch.ExpertLayout, name))


def _check_docstring(function) -> None:
    text = inspect.getdoc(function) or ""
    missing = [name for name in inspect.signature(function).parameters if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"the docstring of {function.__name__} does not mention {missing}"


def test_a_thin_docstring_is_found():
    def scale(x, factor):
        """Multiplies x."""

    with pytest.raises(AssertionError, match="factor"):
        _check_docstring(scale)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_annotated(name):
    signature = inspect.signature(getattr(anabranch, name))
    assert signature.return_annotation is not signature.empty
    assert all(parameter.annotation is not signature.empty for parameter in signature.parameters.values())


def test_importing_needs_torch_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[><=]", line)[0] for line in project["dependencies"]] == ["torch"]


def test_types_are_shipped():
    assert (Path(anabranch.__file__).parent / "py.typed").exists()
