"""Which configuration a launch gets, by what is stored and what the environment asks for."""

import json

import pytest
import torch

from anabranch.errors import ArgumentError
from anabranch.tuning import choose, lookup, standing, tables
from anabranch.tuning.cache import Cache, document, folder


@pytest.fixture
def on(gpu, monkeypatch):
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "1")
    return gpu


def store(place, product, config):
    Cache().add(place, {str(product.key()): {"config": vars(config)}})


def test_nothing_is_searched_unless_asked(gpu, product, tiles):
    subject = product()
    assert choose(subject, tiles(1)) == tiles(1)
    assert subject.searched == 0
    assert not folder().exists()


def test_asked_it_searches_once_and_stores(on, product, tiles, place):
    subject = product()
    assert [choose(subject, tiles(1)) for _ in range(3)] == [tiles(4)] * 3
    assert subject.searched == 1
    stored = json.loads((folder() / place.file).read_text())
    assert stored["measured"] == vars(place)
    assert stored["results"][str(subject.key())]["config"] == vars(tiles(4))


def test_stored_results_serve_a_new_process(on, product, tiles, monkeypatch):
    choose(product(), tiles(1))
    on()
    again = product()
    assert choose(again, tiles(1)) == tiles(4)
    monkeypatch.delenv("ANABRANCH_AUTOTUNE")
    assert choose(again, tiles(1)) == tiles(4)
    assert again.searched == 0


def test_turned_off(on, product, tiles, monkeypatch):
    choose(product(), tiles(1))
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "0")
    assert choose(product(), tiles(1)) == tiles(1)


def test_again_searches_what_is_stored_but_once(on, product, tiles, place, monkeypatch):
    subject = product()
    store(place, subject, tiles(2))
    assert choose(subject, tiles(1)) == tiles(2)
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "again")
    assert [choose(subject, tiles(1)) for _ in range(2)] == [tiles(4)] * 2
    assert subject.searched == 1


def test_what_lookups_stand_on_changes_with_what_they_find(gpu, product, tiles, place, monkeypatch):
    subject = product()
    first = standing(subject.device)
    choose(subject, tiles(1))
    assert first is not None
    assert standing(subject.device) is first
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "1")
    assert standing(subject.device) is None
    choose(subject, tiles(1))
    monkeypatch.delenv("ANABRANCH_AUTOTUNE")
    second = standing(subject.device)
    assert second is not None
    assert second is not first
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "0")
    assert standing(subject.device) not in (None, second)
    monkeypatch.delenv("ANABRANCH_AUTOTUNE")
    monkeypatch.setattr(lookup.keys, "place", lambda device: None)
    assert standing(subject.device) not in (None, second)


def test_what_is_settled_is_found_once_while_it_stands(product, monkeypatch):
    device, numbers, settled = product().device, iter(range(9)), lookup.Settled()
    found = []
    for by in ("a", "a", None, None, "a", "b", "b"):
        monkeypatch.setattr(lookup, "standing", lambda _, by=by: by)
        found.append(settled.get(device, lambda: next(numbers)))
    assert found == [0, 0, 1, 2, 3, 4, 4]


def test_a_wrong_word_is_an_error(gpu, product, tiles, monkeypatch):
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "yes")
    with pytest.raises(
        ArgumentError, match="ANABRANCH_AUTOTUNE: expected unset or one of 0, 1, again, got 'yes'"
    ):
        choose(product(), tiles(1))


def test_two_hundred_token_counts_are_a_few_searches(on, product, tiles):
    counts = range(1, 8192, 41)
    assert len(counts) == 200
    x = product(rows=8192).x
    subjects = [product(rows=4) for _ in counts]
    for subject, count in zip(subjects, counts, strict=True):
        subject.x = x[: count + 3]
    assert {choose(subject, tiles(1)) for subject in subjects} == {tiles(4)}
    assert sum(subject.searched for subject in subjects) <= 12


def test_results_hold_for_one_gpu_triton_and_driver(on, product, tiles, place, monkeypatch):
    choose(product(), tiles(1))
    for name in ("device", "capability", "triton", "driver"):
        other = type(place)(**{**vars(place), name: "another"})
        monkeypatch.setattr(lookup.keys, "place", lambda device, other=other: other)
        subject = product()
        choose(subject, tiles(1))
        assert subject.searched == 1, name


def test_a_stored_configuration_that_cannot_run_is_ignored(gpu, product, tiles, place):
    subject = product()
    store(place, subject, tiles(101))
    assert choose(subject, tiles(1)) == tiles(1)


def test_a_stored_configuration_of_other_fields_is_ignored(gpu, product, tiles, place):
    subject = product()
    Cache().add(place, {str(subject.key()): {"config": {"block": 3}}})
    assert choose(subject, tiles(1)) == tiles(1)


def test_no_search_while_a_graph_is_captured(on, product, tiles, monkeypatch):
    subject = product(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(subject, tiles(1)) == tiles(1)
    assert subject.searched == 0


def test_zeros_are_not_searched_on_but_what_follows_is(on, product, tiles):
    subject = product()
    x = subject.x.clone()
    subject.x.zero_()
    assert choose(subject, tiles(1)) == tiles(1)
    subject.x.copy_(x)
    assert choose(subject, tiles(1)) == tiles(4)


def test_a_wrong_heuristic_is_told_and_not_stored(on, product, tiles, place):
    subject = product()
    with pytest.warns(RuntimeWarning, match="keeps the heuristic's tiles for multiply.forward"):
        assert choose(subject, tiles(1, 3)) == tiles(1, 3)
    assert choose(subject, tiles(1, 3)) == tiles(1, 3)
    assert subject.searched == 1
    assert not (folder() / place.file).exists()


def test_a_cache_that_cannot_be_written(on, product, tiles, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "file"))
    subject = product()
    with pytest.warns(RuntimeWarning, match="cannot store"):
        assert choose(subject, tiles(1)) == tiles(4)
    assert choose(subject, tiles(1)) == tiles(4)
    assert subject.searched == 1


def test_the_trial_leaves_the_callers_memory_alone(on, product, tiles):
    """A kernel that adds to its output would have added once for every candidate."""
    subject = product(candidates=(tiles(2), tiles(64, 6)))
    out = torch.full((40, 12), 7.0)
    config = choose(subject, tiles(1))
    assert out.eq(7).all()
    subject.run(config, [out])
    first = out.clone()
    subject.run(choose(subject, tiles(1)), [out])
    assert torch.equal(out, first)


@pytest.fixture
def table(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "tables")
    tables._table.cache_clear()
    yield lambda name, results: write(tmp_path / "tables" / name / "multiply.json", results)
    tables._table.cache_clear()


def write(path, results):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document(results)))


def test_shipped_tables_go_by_device_then_capability(gpu, product, tiles, place, table, monkeypatch):
    small, large = product(), product(rows=500)
    table("sm_90", {str(s.key()): {"config": vars(tiles(2))} for s in (small, large)})
    table("nvidia_imaginary_1", {str(large.key()): {"config": vars(tiles(3))}})
    assert [choose(s, tiles(1)) for s in (small, large)] == [tiles(2), tiles(3)]
    store(place, small, tiles(4))
    assert choose(small, tiles(1)) == tiles(4)
    monkeypatch.setenv("ANABRANCH_AUTOTUNE", "0")
    assert choose(large, tiles(1)) == tiles(1)


def test_shipped_tables_are_whole():
    for path in tables.FOLDER.rglob("*.json"):
        assert path.parent.parent == tables.FOLDER
        for text, entry in tables.parse(path.read_text()).items():
            assert text.startswith(f"{path.stem}.")
            assert all(isinstance(value, (int, bool)) for value in entry["config"].values())
