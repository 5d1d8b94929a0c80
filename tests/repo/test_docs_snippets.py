"""The documentation runs, and its relative links resolve.

A page's Python blocks are executed in order, in one namespace. A block right after the comment
``<!-- no-run -->`` is only compiled, and is counted in NO_RUN with its reason.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
PAGES = [path for path in (*NAMED, *sorted(ROOT.glob("docs/**/*.md"))) if path.exists()]

# Page -> how many blocks cannot run, and why.
NO_RUN: dict[str, tuple[int, str]] = {}

BLOCK = re.compile(
    r"(?P<skip>^[ ]*<!-- no-run -->\n\s*)?^```python[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def blocks(text: str, filename: str) -> Iterator[tuple[object, bool]]:
    """Each block compiled, with the page's own line numbers, and whether it is to be run."""
    for match in BLOCK.finditer(text):
        above = text.count("\n", 0, match.start("code"))
        yield compile("\n" * above + match["code"], filename, "exec"), match["skip"] is None


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    skipped = 0
    for code, run in blocks(page.read_text(), str(page)):
        if run:
            exec(code, namespace)
        else:
            skipped += 1
    allowed, _ = NO_RUN.get(page_id(page), (0, ""))
    assert skipped == allowed, f"{skipped} blocks are marked no-run; NO_RUN says {allowed}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = [
        link
        for link in LINK.findall(text)
        if not re.match(r"[a-z]+:", link) and not _resolves(page, *link.partition("#")[::2])
    ]
    assert not dead, f"{page_id(page)} links to {dead}"


def _resolves(page: Path, path: str, anchor: str) -> bool:
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in _anchors(target.read_text())


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_run_names_pages():
    assert set(NO_RUN) <= {page_id(page) for page in PAGES}


def test_a_broken_block_is_found():
    page = "\n".join(
        [
            *("# Page", "", "```python", "x = 1", "```", ""),
            *("<!-- no-run -->", "```python", "x = 2", "```", ""),
            *("```python", "assert x == 2", "```", ""),
        ]
    )
    namespace: dict[str, object] = {}
    (first, run_first), (_, run_second), (third, run_third) = blocks(page, "page.md")
    assert (run_first, run_second, run_third) == (True, False, True)
    exec(first, namespace)
    with pytest.raises(AssertionError) as raised:
        exec(third, namespace)
    assert raised.traceback[-1].lineno + 1 == 13
