"""Table 3 in small: every setting is a change, and its numbers are there for all."""

import csv
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_notebooks import FORKS

from annotated_transformer import experiments
from annotated_transformer.corpora import DATA
from annotated_transformer.experiments import SETTINGS, UPDATES, alter, run, trial
from annotated_transformer.greedy import NextWord
from annotated_transformer.masks import subsequent_mask
from annotated_transformer.model import make_model

pytestmark = pytest.mark.usefixtures("one_thread")
BRIEF = dict(updates=3, ask=4)


def read(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def base(one_thread):
    return trial(0, **BRIEF)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "base"])
def test_each_setting_changes_something(base, name):
    assert trial(0, **BRIEF, **SETTINGS[name])["loss"] != base["loss"]


def test_the_same_seed_is_the_same_run(base):
    assert trial(0, **BRIEF) == base != trial(1, **BRIEF) | {"seed": 0}


def test_what_is_learnt_from_is_not_asked():
    _, seen, unseen, rows = experiments.lessons(ask=500)
    assert (len(seen), len(unseen), len(rows)) == (2000, 500, 500)
    assert not {str(pair) for pair in seen} & {str(pair) for pair in unseen}


@pytest.mark.parametrize("positions", ["sines", "learned", "none"])
def test_an_altered_model_decodes_with_its_cache_as_without(positions):
    torch.manual_seed(0)
    model = alter(make_model(14, 14, 2, 32, 64, 4), d_k=2, positions=positions).eval()
    src, tgt = torch.randint(4, 14, (2, 3, 6))
    whole = model(src, tgt, None, subsequent_mask(6))[:, -1]
    ask = NextWord(model, src, None)
    for t in range(1, 7):
        said = ask(tgt[:, :t])
    torch.testing.assert_close(said, model.generator(whole))


def test_a_small_run_writes_a_row_for_each_setting_and_seed(tmp_path, monkeypatch):
    """Its two processes start with large libraries read, but with nothing of ours."""
    monkeypatch.setattr(experiments, "get_context", lambda spawn: FORKS)
    settings = {"base": dict(ask=4), "changed": dict(ask=4, h=2, ramp=False)}
    path = tmp_path / "small.csv"
    run(path, settings, seeds=(0, 1), updates=2, processes=2)
    rows = read(path)
    assert [path.name for path in tmp_path.iterdir()] == ["small.csv"]
    told = [(row["setting"], row["seed"], row["updates"]) for row in rows]
    assert told == [(name, seed, "2") for name in settings for seed in "01"]
    here = trial(1, updates=2, **settings["changed"])  # and in this process
    assert rows[3] == {"setting": "changed"} | {k: str(v) for k, v in here.items()}


def test_a_run_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    def threads(count, _, *begin):
        return ThreadPoolExecutor(count, "trial", *begin)

    monkeypatch.setattr(experiments, "ProcessPoolExecutor", threads)
    path = tmp_path / "old.csv"
    path.write_text("old")
    with pytest.raises(ValueError, match="must be a multiple of h"):
        run(path, {"wrong": dict(h=3)}, seeds=(0,), updates=1, processes=1)
    assert path.read_text() == "old"


def test_the_committed_numbers_are_whole():
    rows = read(DATA / "experiments.csv")
    told = [(row["setting"], row["seed"], row["updates"]) for row in rows]
    assert told == [(name, s, str(UPDATES)) for name in SETTINGS for s in "012"]
    for row in rows:
        loss, perplexity = float(row["loss"]), float(row["perplexity"])
        assert math.isclose(math.exp(loss), perplexity, rel_tol=2e-3)
        assert 0 <= float(row["BLEU"]) <= 100
