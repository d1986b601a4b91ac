"""From a corpus to a translator: trainings of seconds, and what can befall them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_notebooks import FORKS, on_one_thread

from annotated_transformer import checkpoints, translation
from annotated_transformer.corpora import DATA, load_corpus
from annotated_transformer.recipe import (
    PRESETS,
    Config,
    build_model,
    choose_device,
    learn_units,
    load_units,
    make_loader,
)
from annotated_transformer.translation import Journal, main, train
from annotated_transformer.translator import Translator, score, split_text

ODD = [
    "",
    "   ",
    "Quastenflosser Xylophon",
    "Ein Hund. " * 150,
    "wort " * 300,
    "x" * 3000,
]
ODD += ["😀", "Nummer\u00a028.", "Zwei  Hunde\tspielen.", "</s> <s> <unk>", "漢字"]


pytestmark = pytest.mark.usefixtures("one_thread")
needs_pretrained = pytest.mark.skipif(
    not (DATA / "pretrained").is_dir(), reason="a package without the repository"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a few hundred captions."""
    folder = tmp_path_factory.mktemp("corpus")
    for split, size in {"train": 300, "validation": 30, "test": 30}.items():
        pairs = load_corpus("captions")[split].select(range(size))["translation"]
        for side in ("de", "en"):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def settings(corpus):
    """Settings with which a training takes a second."""
    sizes = dict(N=1, d_model=32, d_ff=64, h=2, max_tokens=512, vocabulary=600)
    steps = dict(epochs=2, warmup=20, average=2, beam_sizes=(1, 2), alphas=(0.6,))
    return sizes | steps | dict(corpus=str(corpus), progress=False)


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("run") / "first"
    return train(Config(**settings, save_every=5, output=str(folder)))


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())
    return to


def weights(folder):
    return load_file(Path(folder, "model.safetensors"))


def equal(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def rows(folder):
    found = Journal(Path(folder, "metrics.jsonl")).rows
    return [{k: v for k, v in row.items() if "second" not in k} for row in found]


# ---- a run and its folder


def test_a_run_leaves_everything(run):
    names = {file.name for file in run.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert names >= {"metrics.jsonl", "checkpoints", "checksums.json"}
    assert len(checkpoints.list_checkpoints(run / "checkpoints")) == 2
    facts = json.loads((run / "config.json").read_text())
    best = max(facts["tried"], key=lambda row: row["BLEU"])
    assert facts["decode"] == {"beam_size": best["beam_size"], "alpha": best["alpha"]}
    assert {row["beam_size"] for row in facts["tried"]} == {1, 2}
    assert facts["pairs"] == 300 and set(facts["test"]["signatures"]) <= set(
        facts["test"]
    )


def test_the_journal_has_a_row_for_each_update_and_epoch(run):
    updates = [row for row in rows(run) if "loss" in row]
    epochs = [row for row in rows(run) if "validation" in row]
    assert [row["step"] for row in updates] == list(range(1, len(updates) + 1))
    assert updates[0].keys() == {"step", "rate", "loss", "tokens"}
    assert [row["epoch"] for row in epochs] == [1, 2]
    assert epochs[1]["validation"] < epochs[0]["validation"]
    assert updates[-1]["tokens"] > updates[0]["tokens"]


def test_the_weights_are_the_mean_of_the_last_checkpoints(run):
    saved = checkpoints.list_checkpoints(run / "checkpoints")
    parts = [weights(folder) for folder in saved]
    for name, weight in weights(run).items():
        mean = (parts[0][name].double() + parts[1][name].double()) / 2
        torch.testing.assert_close(weight.double(), mean, atol=1e-6, rtol=1e-6)


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [3, 8])  # before and behind the first checkpoint
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    settings, run, after, tmp_path, monkeypatch
):
    config = Config(**settings, save_every=5, output=str(tmp_path / "again"))

    def add(self, row, add=Journal.add):
        add(self, row)
        if row["step"] == after:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Journal, "add", add)
        train(config)
    with open(tmp_path / "again" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')  # what a crash leaves
    seen = []
    assert equal(weights(train(config, seen)), weights(run))
    kept = Journal(Path(config.output, "metrics.jsonl")).rows
    assert seen == kept and seen[0]["step"] == 1  # those before the stop, too
    assert rows(tmp_path / "again") == rows(run)


def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(settings, run, tmp_path):
    config = Config(**settings, save_every=5, output=str(tmp_path / "again"))
    process = FORKS.Process(target=on_one_thread, args=(train, config))
    process.start()
    saves = tmp_path / "again" / "checkpoints"
    while process.is_alive() and not checkpoints.list_checkpoints(saves):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "done before it could be killed"
    assert equal(weights(train(config)), weights(run))


def test_no_checkpoint_is_written_over_another(settings, tmp_path, monkeypatch):
    steps, write = [], checkpoints.save_checkpoint

    def save(folder, model, optimizer, scheduler, state, keep):
        steps.append(state.step)
        return write(folder, model, optimizer, scheduler, state, keep)

    monkeypatch.setattr(translation.checkpoints, "save_checkpoint", save)
    train(Config(**settings, save_every=1, output=str(tmp_path)))
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 8


def test_another_process_draws_on_as_if_it_had_started_here(settings, tmp_path):
    config = Config(**settings | dict(epochs=1), output=str(tmp_path))
    train(config)
    splits, units = load_corpus(config.corpus), load_units(tmp_path, "pieces")
    loaders = [
        make_loader(config, splits[split], units, split == "train")
        for split in ("train", "validation")
    ]
    model = build_model(config, *units)
    translation.learn(config, model, loaders, tmp_path / "other", rank=1)
    went_on = torch.get_rng_state()
    torch.manual_seed(99)
    translation.resume(config, model, tmp_path / "checkpoints", rank=1)
    assert torch.equal(torch.get_rng_state(), went_on)


def test_a_folder_of_something_else_is_refused(settings, tmp_path):
    for text in ("", "{}", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(OSError, match="config.json is of no run: use another"):
            train(Config(**settings, output=str(tmp_path)))
        assert (tmp_path / "config.json").read_text() == text


def test_a_run_older_than_a_setting_goes_on(settings, tmp_path):
    config = Config(**settings | dict(epochs=1), output=str(tmp_path))
    train(config)
    facts = json.loads((tmp_path / "config.json").read_text())
    del facts["settings"]["factor"]
    (tmp_path / "config.json").write_text(json.dumps(facts))
    train(replace(config, epochs=2))
    with pytest.raises(ValueError, match=r"factor 1\.0, not 2\.0"):
        train(replace(config, factor=2.0))


def test_a_model_of_another_version_or_machine(run, tmp_path):
    translator = Translator.load(run)
    translator.config["settings"]["device"] = "cuda"  # trained where there was one
    translator.save(tmp_path)
    said = Translator.load(tmp_path).translate("Ein Hund bellt.")
    assert said == Translator.load(run).translate("Ein Hund bellt.")
    translator.config["settings"]["gone"] = 1
    translator.save(tmp_path)
    with pytest.raises(ValueError, match="config.json is of another version.*gone"):
        Translator.load(tmp_path)


def test_two_files_are_named_by_their_languages():
    config = Config(source="x/a.de.gz", target="b.en")
    assert (config.source, config.target) == ("de", "en")
    assert config.corpus == "x/a.de.gz,b.en"
    for pair in (("a.txt", "b.txt"), ("a.de", "en"), ("de", "a.en")):
        with pytest.raises(ValueError, match=f"{pair[0]}.*{pair[1]}.*--corpus FILE"):
            Config(source=pair[0], target=pair[1])


def test_a_translator_is_scored_on_two_files(run, corpus, capsys, tmp_path):
    files = ",".join(str(corpus / f"validation.{side}") for side in ("de", "en"))
    main(["evaluate", str(run), "--corpus", files])
    said = capsys.readouterr().out
    assert "test, 30 pairs, greedy: " in said and "test, 30 pairs, {'beam" in said
    with pytest.raises(SystemExit, match="has no split dev, only test"):
        main(["evaluate", str(run), "--corpus", files, "--split", "dev"])


def test_another_recipe_is_refused_with_both_values(settings, run):
    before = (run / "config.json").read_bytes()
    for name, value in dict(dropout=0.3, d_ff=96, seed=5, lowercase=True).items():
        with pytest.raises(ValueError, match=rf"{name} .*not {value}"):
            train(Config(**settings | {name: value}, output=str(run)))
    assert (run / "config.json").read_bytes() == before


def test_a_corpus_that_has_changed_is_refused(settings, corpus, tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    config = Config(**settings | {"corpus": str(folder)}, output=str(tmp_path / "run"))
    train(replace(config, epochs=1))
    before = (tmp_path / "run" / "config.json").read_bytes()
    for file in folder.glob("train.*"):
        file.write_text("\n".join(file.read_text().splitlines()[::-1]) + "\n")
    with pytest.raises(ValueError, match=r"another .*\(\d+ pairs, \w+, not \d+ pairs"):
        train(config)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_more_epochs_may_follow(settings, run, tmp_path):
    config = Config(**settings, output=str(tmp_path))
    train(replace(config, epochs=1))
    assert [row["epoch"] for row in rows(tmp_path) if "epoch" in row] == [1]
    train(config)
    assert [row["epoch"] for row in rows(tmp_path) if "epoch" in row] == [1, 2]


@pytest.mark.parametrize(
    "losses, patience, stalled",
    [
        ([], 1, False),
        ([3.0], 1, False),
        ([3.0, 2.0, 1.0], 1, False),
        ([3.0, 2.0, 2.5], 1, True),
        ([3.0, 2.0, 2.5, 1.9], 2, False),
        ([1.0, 2.0, 3.0], 2, True),
        ([1.0, 2.0, 3.0], 3, False),
    ],
)
def test_patience(tmp_path, losses, patience, stalled):
    journal = Journal(tmp_path / "metrics.jsonl")
    for loss in losses:
        journal.add({"step": 1, "validation": loss})
    assert journal.stalled(patience) == stalled


def test_training_stops_when_nothing_improves(settings, tmp_path, monkeypatch):
    measured = translation.training.run_epoch

    def run_epoch(batches, model, criterion, optimizer=None, *rest, **more):
        loss, state = measured(batches, model, criterion, optimizer, *rest, **more)
        return (loss if optimizer else 5.0), state

    monkeypatch.setattr(translation.training, "run_epoch", run_epoch)
    train(Config(**settings | dict(epochs=9, patience=2), output=str(tmp_path)))
    assert [row["epoch"] for row in rows(tmp_path) if "epoch" in row] == [1, 2, 3]


def test_a_loss_that_is_no_number_stops_the_run(settings, tmp_path, monkeypatch):
    class Breaks(translation.LabelSmoothing):
        calls = 0

        def forward(self, log_probs, target):
            Breaks.calls += 1
            return super().forward(log_probs, target) * (
                1 if Breaks.calls < 8 else torch.nan
            )

    monkeypatch.setattr(translation, "LabelSmoothing", Breaks)
    config = Config(**settings, save_every=3, output=str(tmp_path))
    with pytest.raises(FloatingPointError, match=r"(?s)nan.*8.*rate"):
        train(config)
    saved = checkpoints.list_checkpoints(tmp_path / "checkpoints")
    assert [folder.name[-1] for folder in saved] == ["3", "6"]
    assert all(weight.isfinite().all() for weight in weights(saved[-1]).values())


def test_words_in_place_of_pieces(settings, tmp_path):
    folder = train(
        Config(**settings | dict(epochs=1), units="words", output=str(tmp_path))
    )
    assert (folder / "tokenizer.source.json").exists()
    translator = Translator.load(folder)
    assert len(translator.source) != len(translator.target)
    assert all(isinstance(text, str) for text in translator.translate(ODD))


def test_your_own_two_files(settings, corpus, tmp_path):
    sides = {side: str(corpus / f"train.{side}") for side in ("de", "en")}
    two = dict(source=sides["en"], target=sides["de"], epochs=1)
    folder = train(Config(**settings | two, output=str(tmp_path / "run")))
    facts = json.loads((folder / "config.json").read_text())
    assert [facts["settings"][side] for side in ("source", "target")] == ["en", "de"]
    assert isinstance(Translator.load(folder).translate("A dog."), str)
    Path(tmp_path, "short.de").write_text("Ein Hund.\n")
    with pytest.raises(ValueError, match="300"):
        train(Config(source=sides["en"], target=str(tmp_path / "short.de")))


# ---- what goes in


def test_the_units_are_learnt_from_both_sides_of_training_alone(corpus, tmp_path):
    splits = load_corpus(str(corpus))
    learn_units(Config(vocabulary=1500), splits["train"], tmp_path)
    source, target = load_units(tmp_path, "pieces")
    assert source is target
    for side in ("de", "en"):
        texts = [row[side] for row in splits["train"]["translation"]]
        ratio = sum(map(len, map(source.encode, texts))) / len(" ".join(texts).split())
        assert ratio < 2  # most words are one or two pieces, in either language


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_every_pair(corpus, tmp_path, workers):
    splits = load_corpus(str(corpus))
    config = Config(vocabulary=600, max_tokens=256, max_len=60, workers=workers)
    learn_units(config, splits["train"], tmp_path)
    units = load_units(tmp_path, "pieces")
    plain = make_loader(replace(config, workers=0), splits["train"], units, True)
    loader = make_loader(config, splits["train"], units, True)
    pairs = []
    for batch, other in zip(loader, plain, strict=True):
        assert torch.equal(batch.src, other.src) and torch.equal(batch.tgt, other.tgt)
        assert max(batch.src.numel(), batch.tgt_y.numel()) <= 256
        for source, gold in zip(batch.src.tolist(), batch.tgt_y.tolist(), strict=True):
            pairs.append((units[0].decode(source), units[1].decode(gold)))
    texts = [(row["de"], row["en"]) for row in splits["train"]["translation"]]
    assert sorted(pairs) == sorted(texts)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_training_and_count_validation_once(corpus, tmp_path, world):
    splits = load_corpus(str(corpus))
    config = Config(vocabulary=600, max_tokens=128, max_len=60)
    learn_units(config, splits["train"], tmp_path)
    units = load_units(tmp_path, "pieces")
    for split, whole in (("train", False), ("validation", True)):
        loaders = [
            make_loader(config, splits[split], units, split == "train", rank, world)
            for rank in range(world)
        ]
        seen = [i for loader in loaders for b in loader.batch_sampler for i in b]
        assert len(seen) == len(set(seen))
        assert not whole or sorted(seen) == list(range(len(splits[split])))
        assert whole or len({len(loader) for loader in loaders}) == 1


def test_more_processes_than_batches_are_refused(corpus, tmp_path):
    splits = load_corpus(str(corpus))
    config = Config(vocabulary=600, max_tokens=1024)
    learn_units(config, splits["train"], tmp_path)
    units = load_units(tmp_path, "pieces")
    with pytest.raises(ValueError, match="99 processes, and not one batch for each"):
        make_loader(config, splits["train"], units, True, 0, 99)
    make_loader(config, splits["validation"], units, False, 0, 99)


def test_long_pairs_are_dropped_in_training_and_cut_in_validation(corpus, tmp_path):
    splits = load_corpus(str(corpus))
    config = Config(vocabulary=600, max_len=12)
    learn_units(config, splits["train"], tmp_path)
    units = load_units(tmp_path, "pieces")
    for split in ("train", "validation"):
        loader = make_loader(config, splits[split], units, split == "train")
        assert (len(loader.dataset) == len(splits[split])) == (split == "validation")
        for row in loader.dataset:
            for ids in (row["source"], row["target"]):
                assert ids[0] == 1 and ids[-1] == 2 and len(ids) <= 12
    with pytest.raises(ValueError, match=r"no pair of 300 fits into max_len \(3\)"):
        make_loader(replace(config, max_len=3), splits["train"], units, True)


# ---- settings


@pytest.mark.parametrize(
    "wrong",
    [
        dict(preset="huge"),
        dict(units="letters"),
        dict(h=5),
        dict(h=0),
        dict(N=0),
        dict(d_model=-4),
        dict(d_ff=0),
        dict(dropout=1.5),
        dict(dropout=-0.1),
        dict(dropout=float("nan")),
        dict(smoothing=1.0),
        dict(warmup=-1),
        dict(warmup=0),
        dict(factor=-1.0),
        dict(clip=0.0),
        dict(epochs=0),
        dict(patience=0),
        dict(average=0),
        dict(accumulate=0),
        dict(max_len=2),
        dict(max_tokens=50),
        dict(vocabulary=100),
        dict(save_every=-1),
        dict(beam_sizes=(0,)),
        dict(beam_sizes=()),
        dict(alphas=(-0.5,)),
        dict(precision="fp8"),
        dict(device="tpu"),
        dict(source="en"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name_and_number(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError) as caught:
        Config(**wrong)
    said = str(caught.value)
    assert "\n" not in said and re.escape(str(value).strip("(),")) in re.escape(said)
    assert name.split("_")[0] in said or name in ("units", "source")


def test_presets_fill_in_what_is_left_open():
    for name, preset in PRESETS.items():
        config = Config(preset=name)
        assert {key: getattr(config, key) for key in preset} == preset
    assert (Config(preset="small", N=3).N, Config(preset="small", N=3).h) == (3, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="cuda.*no GPU"):
        Config(device="cuda")
    with pytest.raises(ValueError, match="no GPU"):
        choose_device("cuda:1")


# ---- the translator


def test_odd_text_gives_a_string_every_time(run):
    translator = Translator.load(run, "cpu")
    answers = translator.translate(ODD)
    assert len(answers) == len(ODD) and all(isinstance(x, str) for x in answers)
    assert answers[:2] == ["", ""] and translator.translate([]) == []
    translator.model.double()  # one that knows so little is often all but undecided
    short = [text for text in ODD if len(text) < 99] + ["Zwei Hunde spielen."]
    alone = [translator.translate(text, beam_size=1) for text in short]
    assert translator.translate(short, beam_size=1) == alone
    assert alone[-1] == alone[short.index("Zwei  Hunde\tspielen.")]


@needs_pretrained
def test_answers_come_in_the_order_of_the_questions():
    translator = Translator.load(DATA / "pretrained")
    test = load_corpus("captions")["test"].select(range(12))
    texts = [pair["de"] for pair in test["translation"]]
    answers = translator.translate(texts, beam_size=2)
    assert translator.translate(texts[::-1], beam_size=2) == answers[::-1]
    assert len(set(answers)) == 12
    assert translator.translate(texts) == translator.translate(
        texts, **translator.config["decode"]
    )


@pytest.mark.parametrize("wrong", [dict(beam_size=0), dict(alpha=-1.0)])
def test_a_search_that_cannot_work(run, wrong):
    with pytest.raises(ValueError, match=str(*wrong.values())):
        Translator.load(run).translate("Ein Hund.", **wrong)


@given(st.text("ab .!?,\u2026", max_size=60), st.integers(1, 12))
def test_splitting_loses_nothing(text, room):
    text = " ".join(text.split())
    parts = split_text(text, lambda part: len(part) <= room)
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")
    assert all(0 < len(part) <= room for part in parts)
    assert len(parts) == 1 or len(text) > room or not text


def test_a_word_without_end_is_read_to_its_end(run, monkeypatch):
    translator, asked = Translator.load(run), []

    def search(model, ids, **decode):
        asked.extend(ids)
        return [[4]] * len(ids)

    monkeypatch.setattr("annotated_transformer.translator.search", search)
    translator.translate("漢字" * 1000)
    assert max(map(len, asked)) <= translator.config["longest"]
    read = "".join(translator.source.decode(ids) for ids in asked)
    assert read == "漢字" * 1000


def test_long_texts_are_cut_at_the_ends_of_sentences():
    text = "Ein Hund bellt. Was nun? Die Katze, die schläft, wacht auf! Gut."
    parts = split_text(text, lambda part: len(part.split()) <= 6)
    assert parts == [
        "Ein Hund bellt.",
        "Was nun?",
        "Die Katze, die schläft, wacht auf!",
        "Gut.",
    ]


def test_the_same_text_scores_100_and_nothing_scores_0():
    reference = ["A man rides a bicycle."]
    same = score(reference, reference)
    assert [same[name] for name in same["signatures"]] == pytest.approx([100] * 4)
    assert same["exact"] == 100
    assert score(["A man is riding a bicycle."], reference)["BLEU"] == pytest.approx(
        30.74, abs=0.005
    )
    assert score([""], reference)["BLEU"] == 0


def test_case_is_counted_where_the_name_says_so():
    found = score(["a MAN rides a bicycle."], ["A man rides a bicycle."])
    assert found["BLEU"] < 100 and found["exact"] == 0
    assert found["BLEU lower-cased"] == pytest.approx(100)
    assert found["BLEU tokenised"] == pytest.approx(100)
    assert "case:lc" in found["signatures"]["BLEU lower-cased"]


@pytest.mark.parametrize("ours, theirs", [([], []), (["a"], ["a", "b"]), (["a"], [])])
def test_what_cannot_be_scored(ours, theirs):
    with pytest.raises(ValueError, match=f"{len(ours)} .* {len(theirs)}"):
        score(ours, theirs)


def test_a_language_that_spacy_does_not_know():
    assert "BLEU tokenised" not in score(["a"], ["a"], language="tlh")


# ---- folders that are not as they should be


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_or_missing_file_is_named(run, tmp_path, name):
    folder = copy(run, tmp_path / "copy")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        Translator.load(folder)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        Translator.load(folder)


def sign(folder: Path) -> None:
    """Make the checksums fit again, as whoever made the folder would."""
    from hashlib import sha256

    path = folder / "checksums.json"
    sums = {
        n: sha256((folder / n).read_bytes()).hexdigest()
        for n in json.loads(path.read_text())
    }
    path.write_text(json.dumps(sums))


def test_files_that_do_not_fit_each_other(run, settings, corpus, tmp_path):
    folder = copy(run, tmp_path / "wide")
    facts = json.loads((folder / "config.json").read_text())
    facts["settings"]["d_ff"] = 96
    (folder / "config.json").write_text(json.dumps(facts))
    sign(folder)
    with pytest.raises(ValueError, match=r"model.safetensors.*64.*96"):
        Translator.load(folder)
    folder = copy(run, tmp_path / "vocabulary")
    learn_units(Config(vocabulary=500), load_corpus(str(corpus))["train"], folder)
    sign(folder)
    with pytest.raises(ValueError, match=r"model.safetensors.*600.*500"):
        Translator.load(folder)


def test_weights_that_are_no_numbers(run, tmp_path):
    folder = copy(run, tmp_path / "nan")
    found = weights(folder)
    found["generator.proj.bias"][3] = torch.nan
    save_file(found, folder / "model.safetensors")
    sign(folder)
    with pytest.raises(ValueError, match="model.safetensors.*generator.proj.bias"):
        Translator.load(folder)


def test_half_precision_weights_are_read(run, tmp_path):
    folder = copy(run, tmp_path / "half")
    half = {name: weight.bfloat16() for name, weight in weights(folder).items()}
    save_file(half, folder / "model.safetensors")
    sign(folder)
    model = Translator.load(folder).model
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# ---- several processes


def test_two_processes_do_what_one_does(settings, tmp_path):
    train_rows = load_corpus(settings["corpus"])["train"]
    learn_units(Config(**settings), train_rows, tmp_path)
    units, plain = load_units(tmp_path, "pieces"), None
    for max_tokens in range(400, 600, 20):  # a last odd batch would be left out by two
        config = Config(**settings | dict(max_tokens=max_tokens))
        if len(make_loader(config, train_rows, units, True)) % 2 == 0:
            plain = settings | dict(max_tokens=max_tokens, dropout=0.0, average=1)
            break
    plain |= dict(beam_sizes=(1,))
    one = train(Config(**plain, accumulate=2, output=str(tmp_path / "one")))
    code = f"""
import torch
torch.set_num_threads(1)
from annotated_transformer.translation import Config, train
train(Config(**{plain!r}, output={str(tmp_path / "two")!r}))
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", script],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, weight in weights(tmp_path / "two").items():
        torch.testing.assert_close(weight, weights(one)[name], atol=2e-5, rtol=1e-4)
    for ours, theirs in zip(rows(one), rows(tmp_path / "two"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)  # validation loss included


def test_one_process_starts_no_group(settings, tmp_path):
    train(Config(**settings | dict(epochs=1), output=str(tmp_path)))
    assert not torch.distributed.is_initialized()


def test_a_compiled_run_learns_the_same(settings, tmp_path, monkeypatch):
    """torch.compile takes the model in as one graph, whatever a batch's shape.

    What it makes of the graph is left to torch: that needs a C++ compiler, and minutes.
    """
    from torch._dynamo.testing import CompileCounter  # takes seconds to import

    seen, ours = CompileCounter(), torch.nn.Module.compile

    def captured(model, **how):
        ours(model, backend=seen, fullgraph=True, **how)

    monkeypatch.setattr(torch.nn.Module, "compile", captured)
    same = settings | dict(epochs=1, beam_sizes=(1,))
    same |= dict(dropout=0.0)  # which is drawn otherwise there
    plain = train(Config(**same, output=str(tmp_path / "plain")))
    compiled = train(Config(**same, compile=True, output=str(tmp_path / "compiled")))
    assert 1 <= seen.frame_count <= 4  # training and validation, and a change of shape
    for name, weight in weights(compiled).items():
        torch.testing.assert_close(weight, weights(plain)[name], atol=1e-5, rtol=1e-4)


# ---- the command line


@pytest.mark.parametrize(
    "line, said",
    [
        ("train --corpus atlantis --output {new}", "atlantis"),
        ("train --preset huge --output {new}", "huge"),
        ("train --dropout 1.5 --output {new}", "1.5"),
        ("train --corpus multi30k --output {new}", "Multi30k"),
        ("translate {new} Hallo", "config.json is missing"),
        ("evaluate {new}", "config.json is missing"),
        ("dance", "dance"),
        ("", "train"),
    ],
)
def test_mistakes_end_with_a_sentence(line, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MULTI30K_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("annotated_transformer.corpora.DATA", tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(line.format(new=tmp_path / "new").split())
    assert caught.value.code not in (0, None)
    printed = capsys.readouterr()
    assert said in f"{caught.value.code}{printed.err}{printed.out}"
    assert not (tmp_path / "new").exists()


def test_help_comes_from_the_settings(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "--d-model" in said and "width of the model" in said
    assert "label smoothing" in said and "captions, multi30k" in said


def test_translating_from_a_shell(run, tmp_path):
    command = [sys.executable, "-m", "annotated_transformer.translation"]
    done = subprocess.run(
        [*command, "translate", run],
        input="Ein Hund.\n\n",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == Translator.load(run).translate("Ein Hund.") + "\n\n"


def test_scores_from_a_shell(run, capsys):
    main(["evaluate", str(run), "--split", "validation"])
    said = capsys.readouterr().out
    assert said.count("nrefs:1|case:mixed") == 6 and "greedy" in said


# ---- the translator that comes with the repository


@needs_pretrained
def test_the_pretrained_translator_still_translates():
    folder = DATA / "pretrained"
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size <= 6_000_000
    translator = Translator.load(folder)
    model = build_model(Config(preset="tiny"), translator.source, translator.target)
    checkpoints.load_weights(model, folder)  # the preset of today still fits it
    test = load_corpus("captions")["test"].select(range(100))
    assert translator.evaluate(test)["exact"] >= 90
