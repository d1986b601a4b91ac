"""The captions hold what they promise; and no broken corpus gets past the door."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch

datasets = pytest.importorskip("datasets")

from annotated_transformer import corpora  # noqa: E402
from annotated_transformer.batches import TokenBatchSampler  # noqa: E402
from annotated_transformer.words import noun_phrase  # noqa: E402

ROOT = Path(__file__).parents[1]
HOME = ROOT / "data" / "captions"
SIZES = {"train": 10_000, "validation": 500, "test": 500}


@pytest.fixture(scope="module")
def rows():
    """The captions as they are committed."""
    read = {}
    for split in SIZES:
        lines = (HOME / f"{split}.jsonl").read_text("utf-8").split("\n")[:-1]
        read[split] = [json.loads(line)["translation"] for line in lines]
    return read


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, with no data/multi30k and no MULTI30K_DIR around."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
    monkeypatch.setattr(corpora, "DATA", tmp_path / "data")
    monkeypatch.delenv("MULTI30K_DIR", raising=False)
    return folder


def left_in(cache):
    return [path for path in cache.rglob("*") if path.is_file()]


# The captions


def test_made_afresh_they_are_the_committed_bytes(tmp_path):
    """In another process, with another hash seed."""
    code = "from annotated_transformer.corpora import write_captions as write\n"
    code += f"write({str(tmp_path)!r})"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    for split in SIZES:
        made = (tmp_path / f"{split}.jsonl").read_bytes()
        assert made == (HOME / f"{split}.jsonl").read_bytes()


def test_the_card_tells_the_truth(rows):
    card = (HOME / "README.md").read_text("utf-8")
    for split, size in SIZES.items():
        sha = hashlib.sha256((HOME / f"{split}.jsonl").read_bytes()).hexdigest()
        assert len(rows[split]) == size and f"{size:,} | `{sha}`" in card
    lengths = [len(row["de"].split()) for split in rows for row in rows[split]]
    assert f"{min(lengths)} to {max(lengths)} words" in card


def test_nothing_is_tested_that_was_trained_on(rows):
    said = [row["de"] for split in SIZES for row in rows[split]]
    assert len({*said}) == len(said)


def test_every_tested_word_was_trained_on(rows):
    count = Counter(w for row in rows["train"] for w in re.findall(r"\w+", row["de"]))
    for row in rows["validation"] + rows["test"]:
        assert min(count[word] for word in re.findall(r"\w+", row["de"])) >= 8, row


def test_without_the_repository_they_are_made(cache, rows):
    corpus = corpora.load_corpus("captions")
    for split in SIZES:
        assert [row["translation"] for row in corpus[split]] == rows[split]


# German agreement, from tables written out by hand and used nowhere else

GENDER = {
    "m": "Mann Nachbar Opa Onkel Vater Bauer Koch Clown Fußballspieler Feuerwehrmann "
    "Hund Dackel Kater Igel Pfannkuchen Apfel Apfelkuchen Keks Tee Kakao Apfelsaft "
    "Hut Mantel Pullover Korb Koffer Brief Schlüssel Regenschirm Teppich Apfelbaum "
    "Tisch Kirschbaum Zug Bus Kürbis Garten Markt Park Bahnhof Strand Schnee Junge "
    "Welpe Hase Schneemann Rasen Weg Sand",
    "f": "Oma Tante Mutter Frau Bäuerin Ärztin Köchin Sängerin Katze Ente Gans Möwe "
    "Wurst Brezel Erdbeere Kirsche Waffel Kürbissuppe Milch Mütze Jacke Kiste "
    "Zeitung Fahrkarte Decke Straßenbahn Blume Sonnenblume Küche Lampe Suppe "
    "Sandburg Sonne",
    "n": "Mädchen Eichhörnchen Wasser Buch Sofa Wohnzimmer Fenster",
}
PLURAL = (
    "Jungen Mädchen Kinder Eltern Männer Frauen Nachbarn Bauern Bäuerinnen "
    "Ärztinnen Köche Köchinnen Clowns Fußballspieler Sängerinnen Feuerwehrleute "
    "Hunde Dackel Welpen Katzen Kater Eichhörnchen Igel Hasen Enten Gänse Möwen "
    "Würste Brezeln Pfannkuchen Äpfel Erdbeeren Kirschen Apfelkuchen Waffeln Kekse "
    "Hüte Mützen Mäntel Jacken Pullover Körbe Kisten Koffer Bücher Zeitungen Briefe "
    "Schlüssel Fahrkarten Regenschirme Blumen Sonnenblumen Kürbisse Schneebälle "
    "Seifenblasen"
).split()
WEAK_NOUNS = "Junge Nachbar Bauer Welpe Hase".split()
UNCOUNTED = "Tee Kakao Kürbissuppe Milch Wasser Apfelsaft Schlittschuh".split()
BY_HEART = """
nom: der alte|die alte|das alte|die alten|ein alter|eine alte|ein altes
acc: den alten|die alte|das alte|die alten|einen alten|eine alte|ein altes
dat: dem alten|der alten|dem alten|den alten|einem alten|einer alten|einem alten
nom: alter|alte|altes|alte
acc: alten|alte|altes|alte
dat: altem|alter|altem|alten
nom: meine alten
acc: meine alten
dat: meinen alten"""


def paradigm() -> set[tuple[str, str, str, str]]:
    """Spread the tables out: (determiner, ending of the adjective, case, gender)."""
    cells, lines = set(), BY_HEART.strip().splitlines()
    for line in lines:
        case, forms = line.split(": ")
        forms = [form.split() for form in forms.split("|")]
        genders = {7: "mfnpmfn", 4: "mfnp", 1: "p"}[len(forms)]
        for words, gender in zip(forms, genders, strict=True):
            ending = words[-1].removeprefix("alt")
            if len(words) == 1:
                cells.add(("", ending, case, gender))
                if gender == "p":
                    cells |= {(many, ending, case, "p") for many in ("zwei", "drei")}
            elif words[0][0] == "d":
                cells.add((words[0], ending, case, gender))
            else:
                for stem in ("sein", "ihr", *["ein"] * (gender != "p")):
                    word = re.sub("^(ein|mein)", stem, words[0])
                    cells.add((word, ending, case, gender))
    return cells


PARADIGM = paradigm()
DETERMINERS = {cell[0] for cell in PARADIGM if cell[0]}


def noun_forms() -> dict[str, set[tuple[str, str]]]:
    """Every form of every noun: what case and gender it may stand for."""
    forms = {}
    for gender, nouns in GENDER.items():
        for noun in nouns.split():
            weak = noun in WEAK_NOUNS
            for case in ("nom", "acc", "dat"):
                form = noun + ("n" if weak and case != "nom" else "")
                forms.setdefault(form, set()).add((case, gender))
    for noun in PLURAL:
        for case in ("nom", "acc", "dat"):
            form = noun + ("n" if case == "dat" and noun[-1] not in "ns" else "")
            forms.setdefault(form, set()).add((case, "p"))
    return forms


NOUN_FORMS = noun_forms()
ADJECTIVES = (
    "klein groß alt jung warm heiß kalt nass reif süß rot blau gelb schwarz schwer "
    "leer schön krumm weich lustig dick fröhlich frech neugierig stolz hungrig müd "
    "faul mutig höflich berühmt"
).split()
GOVERN = {"mit": {"dat"}, "aus": {"dat"}, "für": {"acc"}, "im": {"dat"}, "am": {"dat"}}
GOVERN |= dict.fromkeys(("in", "an", "auf", "unter"), {"acc", "dat"}) | {"ins": {"acc"}}
NOUN = re.compile(r"[A-ZÄÖÜ]\w+")


def phrases(sentence: str):
    """Yield (preposition, determiner, ending of the adjective or None, noun)."""
    words = re.findall(r"\w+|,", sentence[0].lower() + sentence[1:])
    if words[0].title() in NOUN_FORMS and words[0] not in ("die",):
        words[0] = words[0].title()
    for place, word in enumerate(words):
        if not NOUN.fullmatch(word) or word in ("Sonntag", "Morgen", "Besuch", "Lust"):
            continue
        if word in ("Hunger", "Laune", "Schlittschuh"):
            continue
        before, ending, determiner = words[:place], None, ""
        stems = [
            a
            for a in ADJECTIVES
            if before and re.fullmatch(a + "(e[rsmn]?)?", before[-1])
        ]
        if stems:
            ending = before.pop().removeprefix(stems[0])
        after_noun = before[-2:-1] == [","] and before[-3][0].isupper()
        relative = after_noun and before[-3] != "Lust"  # ein Hund, der Wasser trinkt
        if before and before[-1] in DETERMINERS and not relative:
            determiner = before.pop()
        yield (before[-1] if before else "", determiner, ending, word)


def cases(preposition, determiner, ending, noun) -> set[str]:
    """The cases that the words of a phrase agree on."""
    contracted = {"im": "dem", "am": "dem", "ins": "das"}
    article = determiner or contracted.get(preposition, "")
    wanted = {
        (case, gender)
        for word, end, case, gender in PARADIGM
        if word == article and ending in (None, end)
    }
    found = {case for case, gender in wanted & NOUN_FORMS[noun]}
    return found & GOVERN.get(preposition, {"nom", "acc", "dat"})


def test_every_noun_phrase_agrees(rows):
    seen = Counter()
    for row in [row for split in SIZES for row in rows[split]]:
        for phrase in phrases(row["de"]):
            assert phrase[3] in NOUN_FORMS, (phrase, row)
            assert cases(*phrase), (phrase, row)
            bare = phrase[1] == "" and phrase[0] not in ("im", "am", "ins")
            several = any(gender == "p" for _, gender in NOUN_FORMS[phrase[3]])
            assert not bare or several or phrase[3] in UNCOUNTED, (phrase, row)
            seen[phrase[1:3]] += 1
    assert sum(seen.values()) > 20_000 and len(seen) > 40


def test_the_checker_sees_what_is_wrong():
    wrong = (
        "Der kleines Hund. Ein klein Hund. Mit der Hund. Den Junge. Mit zwei Hunde. "
    )
    wrong += (
        "Heiße Tee. Ein kleinen Hund. Mit dem kleinem Hund. Für dem Hund. Ihr Jacke."
    )
    for sentence in wrong.split(". "):
        assert not all(cases(*phrase) for phrase in phrases(sentence)), sentence


def test_the_verb_stands_where_it_belongs(rows):
    """Last, and agreeing, after a conjunction; apart from its prefix nowhere else."""
    subordinate = re.compile(
        r"(?:^|, )(?:weil|dass|wie|während|immer wenn|obwohl) (.+?)(?=[,.])", re.I
    )
    number_of = r"(Two|Three|An?) (?:[a-z]+ ){1,3}?(is|are) "
    number = {"two": "are", "three": "are", "a": "is", "an": "is"}
    ends, found = Counter(), 0
    for row in [row for split in SIZES for row in rows[split]]:
        for clause in subordinate.findall(row["de"]):
            last = clause.split()[-1]
            assert re.fullmatch(r"[a-zäöüß]+(t|en|ln|rn|sind)|sind", last), row
            ends[last] += 1
        if match := re.match(number_of, row["en"]):
            assert number[match[1].lower()] == match[2], row
            found += 1
    assert len(ends) > 60 and found > 1_000


def test_english_is_spelt_well(rows):
    for row in [row for split in SIZES for row in rows[split]]:
        assert not re.search(
            r"\ba [aeiou]|\ban [^aeiou]|  | [.,?]|[+<>$@|{}]", row["en"]
        )
        assert not re.search(r"  | [.,?]|[+<>$@|{}]|\bin dem\b|\ban dem\b", row["de"])
        assert row["en"][0].isupper() and row["de"][0].isupper()
        assert row["en"][-1] == row["de"][-1] and row["de"][-1] in ".?"


def test_all_noun_phrases_against_the_tables():
    """Not only those that were drawn: every determiner, case, gender and adjective."""
    nouns = {"m": "Hut", "f": "Mütze", "n": "Buch", "p": "Hüte"}
    for determiner, ending, case, gender in PARADIGM:
        if determiner[:1] == "d" and determiner != "drei":
            stem = "d"
        else:
            stem = next(
                (s for s in ("ein", "sein", "ihr") if determiner.startswith(s)),
                determiner,
            )
        noun = "m Hut/Hüte x" if gender == "p" else f"{gender} {nouns[gender]} x"
        said, _ = noun_phrase(noun, case, f"{stem} x", gender == "p", "alt old")
        head = nouns[gender] + ("n" if (case, gender) == ("dat", "p") else "")
        assert said.strip() == f"{determiner} alt{ending} {head}".strip()


# Multi30k


def real_folder() -> Path | None:
    places = [os.environ.get("MULTI30K_DIR"), ROOT.parent / "shared" / "multi30k"]
    return next((Path(p) for p in places if p and Path(p).is_dir()), None)


@pytest.mark.skipif(not real_folder(), reason="Multi30k is not here: set MULTI30K_DIR")
def test_multi30k(cache):
    corpus = corpora.load_corpus("multi30k", folder=real_folder())
    assert {split: len(corpus[split]) for split in corpus} == {
        "train": 28_998,
        "validation": 1_014,
        "test": 1_000,
    }
    assert corpus["train"].info.description == "2 of 29000 pairs dropped"
    german = [row["translation"]["de"] for row in corpus["train"]]
    assert "\t" in german[7365] and "@@" not in german
    both = [text for row in corpus["train"] for text in row["translation"].values()]
    assert sum(text.count("\u00a0") for text in both) == 47
    assert corpus["train"].cache_files
    pairs = corpus["train"]["translation"]
    lengths = torch.tensor(
        [[len(p[s].split()) + 3 for s in ("de", "en")] for p in pairs]
    )
    real = room = 0
    for rows in TokenBatchSampler(lengths, 4096):
        real += int(lengths[rows].sum())
        room += len(rows) * int(lengths[rows].amax(dim=0).sum())
    assert 1 - real / room < 0.05  # the share of padding, both sides together


TINY = {"de": [f"Hund {n}." for n in range(30)], "en": [f"Dog {n}." for n in range(30)]}


@pytest.fixture
def tiny(tmp_path, monkeypatch, cache):
    """A corpus of thirty pairs that is taken for Multi30k."""
    sha = {
        side: hashlib.sha256("".join(f"{t}\n" for t in text).encode()).hexdigest()
        for side, text in TINY.items()
    }
    known = (30, sha["de"], sha["en"])
    monkeypatch.setattr(
        corpora, "MULTI30K", dict.fromkeys(("train", "validation", "test"), known)
    )

    def no_hub(name):
        raise OSError(f"{name} did not come from the hub (no network)")

    monkeypatch.setattr(corpora, "fetch", no_hub)

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        for stem in ("train", "val", "test_2016_flickr"):
            for side, text in TINY.items():
                text = "".join(f"{line}\n" for line in text).encode()
                (folder / f"{stem}.{side}.gz").write_bytes(gzip.compress(text))
        return folder

    return make


def page(folder):
    (folder / "val.de.gz").write_bytes(b"\n <!DOCTYPE html><html>Sorry</html>")


def truncated(folder):
    whole = (folder / "train.de.gz").read_bytes()
    (folder / "train.de.gz").write_bytes(whole[:-9])


def damaged(folder):
    whole = bytearray((folder / "train.de.gz").read_bytes())
    whole[len(whole) // 2] ^= 255
    (folder / "train.de.gz").write_bytes(whole)


def one_line_short(folder):
    (folder / "val.en.gz").unlink()
    text = "".join(f"{line}\n" for line in TINY["en"][:-1])
    (folder / "val.en").write_text(text, "utf-8")


def not_utf8(folder):
    (folder / "val.en.gz").unlink()
    (folder / "val.en").write_bytes(b"Dog 0.\nDog \xe4.\n")


def another_text(folder):
    text = "".join(f"{line}\n" for line in TINY["de"]).replace("29", "30")
    (folder / "train.de.gz").write_bytes(gzip.compress(text.encode()))


def more_lines(folder):
    for side in TINY:
        (folder / f"val.{side}.gz").write_bytes(gzip.compress(b"Hund\n" * 31))


def side_missing(folder):
    (folder / "train.en.gz").unlink()


def split_missing(folder):
    for side in TINY:
        (folder / f"val.{side}.gz").unlink()


def stray_binary(folder):
    with tarfile.open(folder / "test.tar.gz", "w:gz") as archive:
        for name, content in {"x.de": b"Hund\n", "._x.de": b"Mac\0\0"}.items():
            item = tarfile.TarInfo(name)
            item.size = len(content)
            archive.addfile(item, io.BytesIO(content))


def torn_archive(folder):
    stray_binary(folder)
    whole = (folder / "test.tar.gz").read_bytes()
    (folder / "test.tar.gz").write_bytes(whole[: len(whole) // 2])


FAULTS = {
    page: "val.de.gz is a web page, not data",
    truncated: "train.de.gz is cut short or damaged",
    damaged: "train.de.gz is cut short or damaged",
    one_line_short: "val.en has 29, val.de.gz has 30",
    not_utf8: "val.en is not UTF-8: see byte 11",
    another_text: "train has another text: sha256 ",
    more_lines: "validation has 31 pairs, not 30",
    side_missing: "has no train.en.gz, only its other side",
    split_missing: "validation is missing, there is only train, test",
    stray_binary: "holds ._x.de, which is not text",
    torn_archive: "test.tar.gz is no folder and no archive",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_and_leaves_nothing(fault, tiny, cache):
    folder = tiny("bad")
    fault(folder)
    with pytest.raises(FileNotFoundError) as caught:
        corpora.load_corpus("multi30k", folder=folder)
    first, tried, own, hub = str(caught.value).splitlines()
    assert first == "Multi30k could not be had:"
    assert tried.startswith(f"{folder}: ") and FAULTS[fault] in tried
    assert "there is no folder" in own and "did not come from the hub" in hub
    assert left_in(cache) == []


def test_the_next_source_is_tried(tiny, cache, monkeypatch):
    bad, good = tiny("bad"), tiny("good")
    truncated(bad)
    monkeypatch.setenv("MULTI30K_DIR", str(good))
    corpus = corpora.load_corpus("multi30k", folder=bad)
    assert [len(corpus[split]) for split in corpus] == [30, 30, 30]


def test_what_the_hub_sends_is_checked_too(tiny, monkeypatch):
    rows = [{"de": d, "en": e} for d, e in zip(TINY["de"], TINY["en"], strict=True)]
    sent = {split: datasets.Dataset.from_list(rows) for split in SIZES}
    monkeypatch.setattr(corpora, "fetch", lambda name: sent)
    assert corpora.load_corpus("multi30k")["test"][3]["translation"]["de"] == "Hund 3."
    sent["test"] = sent["test"].select(range(29))
    with pytest.raises(FileNotFoundError, match="hub: test has 29 pairs, not 30"):
        corpora.load_corpus("multi30k")


def test_an_archive_will_do(tiny, tmp_path):
    folder = tiny("good")
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(folder, "multi30k")
    corpus = corpora.load_corpus("multi30k", folder=tmp_path / "all.tar.gz")
    assert len(corpus["train"]) == 30


# Your own


def write(path, texts):
    path.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return path


def test_two_files(cache, tmp_path):
    pair = write(tmp_path / "a.de", TINY["de"]), write(tmp_path / "a.en", TINY["en"])
    corpus = corpora.load_corpus(pair)
    sizes = {split: len(rows) for split, rows in corpus.items()}
    assert sizes == {"train": 24, "test": 3, "validation": 3}
    said = [row["translation"]["de"] for split in corpus for row in corpus[split]]
    assert sorted(said) == sorted(TINY["de"])
    again = corpora.load_corpus(",".join(map(str, pair)))
    assert again["test"].to_list() == corpus["test"].to_list()
    other = corpora.load_corpus(pair, seed=1)
    assert other["test"].to_list() != corpus["test"].to_list()


def test_the_cache_notices_a_changed_file(cache, tmp_path):
    pair = write(tmp_path / "a.de", TINY["de"]), write(tmp_path / "a.en", TINY["en"])
    corpora.load_corpus(pair)
    write(tmp_path / "a.de", [text.replace("Hund", "Katze") for text in TINY["de"]])
    corpus = corpora.load_corpus(pair)
    assert "Katze" in corpus["train"][0]["translation"]["de"]


def test_unusable_pairs_are_dropped_and_counted(cache, tmp_path):
    german = [*TINY["de"][:-2], "@@", " "]
    pair = write(tmp_path / "a.de", german), write(tmp_path / "a.en", TINY["en"])
    corpus = corpora.load_corpus(pair)
    assert sum(len(rows) for rows in corpus.values()) == 28
    assert corpus["train"].info.description == "2 of 30 pairs dropped"


def test_a_folder_of_other_languages(cache, tmp_path):
    for split in ("train", "dev", "test"):
        write(tmp_path / f"{split}.fr", TINY["de"])
        write(tmp_path / f"{split}.it", TINY["en"])
    corpus = corpora.load_corpus(tmp_path, languages=("fr", "it"))
    assert [*corpus] == ["train", "validation", "test"]
    assert corpus["test"][0] == {"translation": {"fr": "Hund 0.", "it": "Dog 0."}}


def test_lines_of_json(cache, tmp_path):
    rows = [json.dumps({"de": d, "en": d}) for d in TINY["de"]]
    write(tmp_path / "train.jsonl", rows)
    assert len(corpora.load_corpus(str(tmp_path))["train"]) == 24
    write(tmp_path / "train.jsonl", [*rows, '{"de": "Hund"}'])
    with pytest.raises(
        ValueError, match="train.jsonl, line 31: no JSON object with de"
    ):
        corpora.load_corpus(str(tmp_path))


def test_a_line_ends_at_a_line_feed_and_nowhere_else(cache, tmp_path):
    odd = ["Hund\u2028Katze\x0bIgel\x85Hase", *TINY["de"][1:]]
    pair = write(tmp_path / "a.de", odd), write(tmp_path / "a.en", TINY["en"])
    assert sum(len(rows) for rows in corpora.load_corpus(pair).values()) == 30


def test_what_cannot_be_is_said_in_a_sentence(cache, tmp_path):
    short = write(tmp_path / "a.de", TINY["de"][:20])
    pair = short, write(tmp_path / "a.en", TINY["en"])
    with pytest.raises(ValueError, match="a.de has 20, .*a.en has 30"):
        corpora.load_corpus(pair)
    with pytest.raises(ValueError, match="there is no file .*b.en"):
        corpora.load_corpus((short, tmp_path / "b.en"))
    few = [write(tmp_path / f"few.{side}", TINY[side][:5]) for side in TINY]
    with pytest.raises(ValueError, match="5 pairs are too few"):
        corpora.load_corpus(tuple(few))
    for unknown in ("multi40k", "./nowhere", "/no/such/folder", ""):
        with pytest.raises(ValueError, match="there are: captions, multi30k, a folder"):
            corpora.load_corpus(unknown)
    with pytest.raises(ValueError, match="holds neither train.de and train.en"):
        corpora.load_corpus(tmp_path)


def test_any_data_set_with_a_translation(cache, monkeypatch):
    rows = [
        {"id": n, "translation": {"de": "Hund" * (n > 2), "en": "dog"}}
        for n in range(30)
    ]
    sent = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    monkeypatch.setattr(corpora, "fetch", lambda name: sent)
    corpus = corpora.load_corpus("owner/name:de-en")
    assert {split: len(rows) for split, rows in corpus.items()} == {
        "train": 23,
        "test": 2,
        "validation": 2,
    }
    assert corpus["train"].column_names == ["translation"]
    sent = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list([{"text": "Hund"}])}
    )
    with pytest.raises(ValueError, match="no column translation, only text"):
        corpora.load_corpus("owner/name")


def hub_set(**splits: list[dict]) -> datasets.DatasetDict:
    """Make what the hub might send: splits with a column `translation`."""
    rows = {s: [{"translation": one} for one in pairs] for s, pairs in splits.items()}
    return datasets.DatasetDict(
        {s: datasets.Dataset.from_list(some) for s, some in rows.items()}
    )


def test_sides_that_are_missing_or_not_asked_for(cache, monkeypatch):
    pairs = [{"de": f"Hund {n}", "en": f"dog {n}", "fr": None} for n in range(30)]
    pairs[3]["en"] = None
    sent = hub_set(train=pairs, dev=pairs, test=pairs[:5])
    monkeypatch.setattr(corpora, "fetch", lambda name: sent)
    corpus = corpora.load_corpus("owner/name")
    sizes = {split: len(rows) for split, rows in corpus.items()}
    assert sizes == {"train": 29, "validation": 29, "test": 4}
    with pytest.raises(ValueError, match="is in de, en, fr, not in de and it"):
        corpora.load_corpus("owner/name", languages=("de", "it"))
    sent = hub_set(test=pairs)
    with pytest.raises(ValueError, match="no split train, only test"):
        corpora.load_corpus("owner/name")
    assert len(corpora.load_corpus("owner/name", whole=False)["test"]) == 29


def test_what_a_model_is_only_tested_on(cache, tmp_path):
    for side, text in TINY.items():
        (tmp_path / f"test.{side}").write_text("\n".join(text))
    files = [str(tmp_path / f"test.{side}") for side in TINY]
    for name in (",".join(files), tmp_path):
        corpus = corpora.load_corpus(name, whole=False)
        assert {split: len(rows) for split, rows in corpus.items()} == {"test": 30}
    with pytest.raises(ValueError, match="no split train, only test"):
        corpora.load_corpus(tmp_path)
    (tmp_path / "test.en").rename(tmp_path / "test.eng")
    with pytest.raises(ValueError, match="has no test.en.gz, only its other side"):
        corpora.load_corpus(tmp_path)


def test_a_null_in_a_json_line_is_an_empty_side(cache, tmp_path):
    rows = [{"de": f"Hund {n}", "en": f"dog {n}"} for n in range(20)]
    rows[2]["de"] = None
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "train.jsonl").write_text(text)
    corpus = corpora.load_corpus(tmp_path, whole=False)
    assert len(corpus["train"]) == 19


FULL = """
import resource, signal, sys
from annotated_transformer.corpora import load_corpus
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    load_corpus(sys.argv[1])
except OSError as error:
    print(error)
"""


def test_a_full_disk_is_named(tmp_path):
    for side, text in TINY.items():
        (tmp_path / f"train.{side}").write_text("\n".join(9 * text))
    env = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "train could not be written to the cache (OSError: " in done.stdout


def test_without_a_network_it_ends_soon_and_well():
    code = (
        "from annotated_transformer.corpora import load_corpus\n"
        "import datasets, time\n"
        "started = time.monotonic()\n"
        "try:\n    load_corpus('owner/name')\n"
        "except OSError as error:\n    print(error)\n"
        "offline = datasets.config.HF_HUB_OFFLINE\n"
        "print('seconds', time.monotonic() - started < 10, offline)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"PYTHONPATH": str(ROOT / "tests" / "offline")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "owner/name did not come from the hub" in done.stdout, done.stderr[-2000:]
    assert done.stdout.endswith("seconds True False\n") and done.stderr == ""


def test_bars_are_as_they_were_before(cache, tmp_path, capfd):
    pair = write(tmp_path / "a.de", TINY["de"]), write(tmp_path / "a.en", TINY["en"])
    datasets.enable_progress_bars()
    corpora.load_corpus(pair)
    assert not datasets.utils.are_progress_bars_disabled()
    assert capfd.readouterr().err == ""
