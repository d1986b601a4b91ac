"""Text to ids and back: every kind of odd text, and files that last."""

import gzip
import os
import pickle
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.text import (
    END,
    SPECIALS,
    START,
    UNKNOWN,
    BytePairTokenizer,
    Tokenizer,
    WordTokenizer,
    add_marks,
    keep_eights,
    normalise,
)

ROOT = Path(__file__).parents[1]
MULTI30K = Path(os.environ.get("MULTI30K_DIR", ROOT / "../shared/multi30k"))
GERMAN = ["Der Hund bellt.", "Die Katze schläft.", "Der Hund schläft.", "Ein Hund!"]
ENGLISH = ["The dog barks.", "The cat's asleep.", "The dog isn't here.", "A dog!"]
# Most random characters are rare scripts; those that go wrong are mixed in.
TEXT = st.lists(
    st.one_of(
        st.sampled_from(["Hund", "dog", "</s>", "<unk>", "\u00a0", "\u200b", "😀👍🏽"]),
        st.text(max_size=8),
    )
).map("".join)


@pytest.fixture(scope="module")
def pieces():
    return BytePairTokenizer.train(2 * (GERMAN + ENGLISH), size=300)


@pytest.fixture(scope="module")
def words():
    return WordTokenizer.train(GERMAN, "de", min_freq=1)


@given(TEXT, st.booleans())
def test_normalising_is_done_once_and_for_all(text, lowercase):
    clean = normalise(text, lowercase)
    assert normalise(clean, lowercase) == clean
    assert clean == " ".join(clean.split())
    assert unicodedata.is_normalized("NFC", clean)
    kinds = {unicodedata.category(c) for c in clean}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize(
    "blank", [chr(i) for i in range(0x3100) if chr(i).isspace()], ids=ascii
)
def test_every_blank_is_one_blank(blank):
    assert normalise(f"{blank}Zwei{blank}{blank}Hunde{blank}") == "Zwei Hunde"


@pytest.mark.parametrize(
    "hidden",
    "\u200b \u200c \u200d \u2060 \ufeff \u00ad \u202e \0 \x7f \ud800".split(" "),
)
def test_what_cannot_be_seen_is_dropped(hidden):
    assert normalise(f"Wasser{hidden}fall") == "Wasserfall"


def test_two_spellings_of_a_letter_become_one():
    for letter in "äöüÄÖÜéñç":
        assert normalise(unicodedata.normalize("NFD", letter)) == letter
    assert normalise("GRÜN  Haus", lowercase=True) == "grün haus"


@given(TEXT)
@settings(max_examples=300)
def test_byte_pairs_come_back_exactly(pieces, text):
    ids = pieces.encode(text)
    assert pieces.decode(ids) == normalise(text)
    assert all(UNKNOWN < i < len(pieces) for i in ids)  # no mark, nothing unknown
    assert len(pieces.pieces(text)) == len(ids)
    assert pieces.decode([START, *ids, END, 0, 0]) == normalise(text)


def test_byte_pairs_show_readable_pieces(pieces):
    assert "".join(pieces.pieces("Der Hund schläft.")) == "_Der_Hund_schläft."


def test_byte_pairs_can_give_up_capitals():
    small = BytePairTokenizer.train(["Der Hund", "der HUND"], 300, lowercase=True)
    assert small.encode("DER hund") == small.encode("der Hund")
    assert small.decode(small.encode("ÜBER DEN Hund")) == "über den hund"


def test_byte_pairs_are_trained_on_normalised_text():
    odd = [text.replace(" ", "\u00a0\t") for text in GERMAN]
    odd = [unicodedata.normalize("NFD", text) for text in odd]
    first, second = (BytePairTokenizer.train(t, 300) for t in (GERMAN, odd))
    assert first.encode("Die Katze schläft.") == second.encode("Die Katze schläft.")


@given(st.lists(st.text("aäb ", max_size=30), max_size=5))
def test_where_pairs_run_out_a_multiple_of_eight_is_left(texts):
    texts = ["Der Hund sieht den Hund, und der Hund sieht den Mund.", *texts]
    learnt = BytePairTokenizer.train(texts, size=400)
    assert len(learnt) % 8 == 0 and len(learnt) < 400
    asked = BytePairTokenizer.train(texts, size=len(learnt))
    more = BytePairTokenizer.train(texts, size=len(learnt) + 8)
    for text in texts:
        assert learnt.encode(text) == asked.encode(text)
        assert learnt.decode(learnt.encode(text)) == normalise(text)
    assert len(asked) == len(more) == len(learnt)


def test_pieces_are_given_up_with_every_merge_that_needs_them():
    some = [chr(97 + i) for i in range(261)] + ["ab", "abc", "ä", "bc"]
    vocab = {piece: i for i, piece in enumerate(some)}  # 265 pieces
    merges = [["a", "b"], ["ab", "c"], ["b", "c"], ["a", "bc"]]
    kept = keep_eights(vocab, merges, type="BPE")
    assert "bc" not in kept["vocab"] and max(kept["vocab"].values()) == 263
    assert kept["merges"] == merges[:2] and kept["type"] == "BPE"


def test_where_nothing_can_be_glued_all_bytes_are_left():
    learnt = BytePairTokenizer.train(["a"], size=300)
    assert len(learnt) == 260
    assert learnt.decode(learnt.encode("äa 😀")) == "äa 😀"


def test_what_was_asked_for_is_given():
    for size in (260, 263):
        assert len(BytePairTokenizer.train(GERMAN, size=size)) == size


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="259.*260"):
        BytePairTokenizer.train(GERMAN, size=259)


@given(TEXT)
def test_words_give_ids_and_text_for_anything(words, text):
    ids = words.encode(text)
    assert all(UNKNOWN <= i < len(words) for i in ids)  # never a mark typed by a user
    assert isinstance(words.decode(ids), str)


def test_words_that_are_too_rare_are_unknown():
    words = WordTokenizer.train(GERMAN, "de", min_freq=2)
    assert words.words == [*SPECIALS, ".", "Hund", "Der", "schläft"]
    assert words.encode("Der Igel schläft.") == [6, UNKNOWN, 7, 4]
    assert words.decode([START, 6, 5, 7, 4, END, 0]) == "Der Hund schläft."


def test_equal_counts_do_not_depend_on_the_order_of_the_text():
    texts = ["b a d c", "f e h g", "c d a b", "g h e f"]
    first, second = (WordTokenizer.train(t, "en") for t in (texts, texts[::-1]))
    assert first.words == second.words == [*SPECIALS, *"abcdefgh"]


@pytest.mark.parametrize("text", [*ENGLISH, "A (very) old T-shirt, isn't it?"])
def test_words_are_put_together_as_they_were_written(text):
    words = WordTokenizer.train([text], "en", min_freq=1)
    assert words.decode(words.encode(text)) == text


def test_blanks_are_no_words():
    words = WordTokenizer(SPECIALS, "de")
    assert words.pieces("Zwei  Hunde\tspielen.") == ["Zwei", "Hunde", "spielen", "."]
    assert words.pieces("Nummer\u00a028.") == words.pieces("Nummer 28.")
    assert words.pieces("  ") == words.pieces("") == words.encode("") == []


def multi30k(name):
    with gzip.open(MULTI30K / f"{name}.gz", "rt", "utf-8", newline="\n") as file:
        return file.read().split("\n")[:-1]


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="Multi30k is not here")
@pytest.mark.parametrize(
    "lowercase, sizes", [(False, (8011, 6190)), (True, (7850, 5892))]
)
def test_the_vocabularies_of_multi30k(lowercase, sizes):
    pairs = list(zip(multi30k("train.de"), multi30k("train.en"), strict=True))
    kept = [pair for pair in pairs if "@@" not in map(str.strip, pair)]
    assert (len(pairs), len(kept)) == (29000, 28998)
    for texts, language, size in zip(
        zip(*kept, strict=True), ("de", "en"), sizes, strict=True
    ):
        words = WordTokenizer.train(texts, language, lowercase=lowercase)
        assert abs(len(words) - size) <= 10


@pytest.mark.parametrize("length", [0, 1, 3, 4, 6, 50])
@pytest.mark.parametrize("max_len", [None, 2, 3, 5, 8])
def test_a_sentence_never_loses_its_end(length, max_len):
    ids = list(range(10, 10 + length))
    marked = add_marks(ids, max_len)
    room = length if max_len is None else min(length, max_len - 2)
    assert marked == [START, *ids[:room], END]
    dropped = add_marks(ids, max_len, drop=True)
    assert dropped == (marked if room == length else None)
    assert ids == list(range(10, 10 + length))  # the caller's list is left alone


@pytest.mark.parametrize("max_len", [1, 0, -3])
def test_marks_need_room(max_len):
    with pytest.raises(ValueError, match=str(max_len)):
        add_marks([5], max_len)


TRAIN = """
import random, sys
from annotated_transformer.text import BytePairTokenizer, WordTokenizer
draw = random.Random(0)
parts = ["schlaf", "hund", "katz", "en", "er", "e", "un", "ge", "haus", "tür"]
words = ["".join(draw.choices(parts, k=3)) for _ in range(1200)]
texts = [" ".join(words[i::200]) for i in range(200)]
BytePairTokenizer.train(texts, 500).save(sys.argv[1], "pieces.json")
WordTokenizer.train(texts, "de").save(sys.argv[1], "words.json")
"""


def test_another_process_learns_the_same(tmp_path, monkeypatch):
    seed = os.environ | {"PYTHONHASHSEED": "1"}  # here it is another, drawn at random
    subprocess.run([sys.executable, "-c", TRAIN, tmp_path / "1"], env=seed, check=True)
    monkeypatch.setattr(sys, "argv", ["", tmp_path / "2"])
    exec(TRAIN, {})
    for name in ("pieces.json", "words.json"):
        first, second = ((tmp_path / seed / name).read_bytes() for seed in "12")
        assert first == second and len(first) > 1000


def test_what_is_saved_comes_back(tmp_path, pieces, words):
    text = "Ein Igel </s> schläft 😀 nicht!"
    for tokenizer in (pieces, words):
        path = tokenizer.save(tmp_path / "new" / "folder")
        assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]
        for again in (
            Tokenizer.load(path.parent),
            Tokenizer.load(path),
            pickle.loads(pickle.dumps(tokenizer)),  # as another process gets it
        ):
            assert type(again) is type(tokenizer) and len(again) == len(tokenizer)
            assert again.encode(text) == tokenizer.encode(text)
            assert again.decode(again.encode(text)) == tokenizer.decode(
                tokenizer.encode(text)
            )


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"words": ["a"]}),
        pickle.dumps(["a"], protocol=0),
        b"",
        b'{"words": ["a"], "language"',
        b'{"words": ["a"]}',
        b"[1, 2]",
        b"7",
        b'{"other": 1}',
        "ü".encode("latin-1"),
    ],
    ids=ascii,
)
def test_a_file_that_is_no_tokenizer_gets_a_sentence(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no tokenizer at .*nowhere"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "call, package",
    [
        ('BytePairTokenizer.train(["a"], 300)', "tokenizers"),
        ('WordTokenizer(["a"], "de").pieces("a")', "spacy"),
        ('WordTokenizer.train(["a"], "de")', "torchtext==0.6.0"),
    ],
)
@pytest.mark.parametrize("fault", ["ImportError", "OSError"])
def test_a_missing_package_is_asked_for_in_one_sentence(call, package, fault):
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tokenizers", "spacy", "torchtext"):
            raise {fault}("undefined symbol\\nin some library")
sys.meta_path.insert(0, Absent())
from annotated_transformer.text import BytePairTokenizer, WordTokenizer
try:
    {call}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and f"pip install '{package}'" in done.stdout
