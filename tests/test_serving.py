"""A trained folder becomes one that is served by CTranslate2, with no torch around."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ctranslate2
import pytest
import torch

from annotated_transformer.corpora import DATA, load_corpus
from annotated_transformer.greedy import greedy_decode
from annotated_transformer.interchange import export, export_ctranslate2, vocabulary
from annotated_transformer.model import make_model
from annotated_transformer.text import BytePairTokenizer, WordTokenizer
from annotated_transformer.translation import main
from annotated_transformer.translator import Translator

NOTEBOOK = next(Path(__file__).parents[1].glob("notebooks/*_beyond_the_notebook.ipynb"))
ODD = ["", "  ", "Zwei  Hunde\tspielen.", "Zwei Hunde spielen.", "</s> <unk>", "😀"]
ALONE = """
import runpy, sys
for name in ("torch", "annotated_transformer", "spacy", "safetensors", "datasets"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not (DATA / "pretrained").is_dir(), reason="a package without the repository"
    ),
]


@pytest.fixture(scope="module")
def german():
    test = load_corpus("captions")["test"].select(range(200))
    return [pair["de"] for pair in test["translation"]]


@pytest.fixture(scope="module", params=["float32", "int8"])
def served(request, tmp_path_factory):
    """The pretrained translator, exported by the command line."""
    folder = tmp_path_factory.mktemp("served") / request.param
    line = ["export", str(DATA / "pretrained"), "--format", "ctranslate2"]
    main([*line, "--output", str(folder), "--quantization", request.param])
    return folder


def program(folder: Path) -> Path:
    """Take the program that the notebook shows out of its text."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    prose = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    (source,) = re.findall(r"```python\n(.*?)```", prose, re.S)
    (folder / "serve.py").write_text(source, "utf-8")
    return folder / "serve.py"


def test_a_served_folder_translates_without_torch(served, german, tmp_path):
    command = [sys.executable, "-c", ALONE, program(tmp_path), served]
    done = subprocess.run(
        command, input="\n".join(german + ODD), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.removesuffix("\n").split("\n")
    ours = Translator.load(DATA / "pretrained", "cpu").translate(german + ODD)
    assert len(answers) == len(ours) and answers[200:202] == ["", ""]
    assert answers[202] == answers[203] != ""
    same = sum(a == b for a, b in zip(answers[:200], ours[:200], strict=True))
    assert same >= (196 if served.name == "float32" else 180)


def test_what_is_not_there_is_really_not_there():
    code = ALONE.replace("runpy.run_path", "import torch; runpy.run_path")
    done = subprocess.run([sys.executable, "-c", code, "x"], capture_output=True)
    assert b"import of torch halted" in done.stderr


def test_eight_bits_take_less_room(tmp_path):
    sizes = {}
    for kind in ("float32", "int8"):
        export(str(DATA / "pretrained"), "ctranslate2", str(tmp_path / kind), kind)
        sizes[kind] = (tmp_path / kind / "model.bin").stat().st_size
    assert sizes["int8"] < 0.5 * sizes["float32"]


def pieces_of(texts):
    tokenizer = BytePairTokenizer.train(texts, 300)
    return tokenizer, tokenizer


def words_of(texts):
    source, target = (WordTokenizer.train(texts, side, 1) for side in ("de", "en"))
    return source, WordTokenizer(target.words + ["more"], "en")


@pytest.mark.parametrize("units", [pieces_of, words_of])
@pytest.mark.parametrize("norm_first", [True, False])
def test_untrained_models_of_every_kind_say_the_same(
    units, norm_first, german, tmp_path
):
    """Random weights give odd answers, which agree only if each number does."""
    torch.manual_seed(1)
    source, target = units(german)
    sizes = dict(N=3, d_model=32, d_ff=48, h=2, norm_first=norm_first)
    tied = dict(share_embeddings=source is target)
    model = make_model(len(source), len(target), **sizes, **tied)
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)  # gains and biases count as well
    config = {"decode": {"beam_size": 1, "alpha": 0.6}, "longest": 99}
    translator = Translator(model, source, target, config)
    folder = export_ctranslate2(translator, tmp_path / "served")
    engine = ctranslate2.Translator(str(folder), intra_threads=1)
    texts = german[:20]
    asked = [source.encode(text) for text in texts]
    words, says = vocabulary(source), vocabulary(target)
    found = engine.translate_batch(
        [[words[i] for i in ids] for ids in asked],
        beam_size=1,
        max_decoding_length=12,
    )
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([1, *ids, 2]) for ids in asked], batch_first=True
    )
    ours = greedy_decode(model, ids, ids.ne(0).unsqueeze(1), 12).tolist()
    same = 0
    for row, one in zip(ours, found, strict=True):
        theirs = [says.index(word) for word in one.hypotheses[0]]
        same += [i for i in row[1:] if i not in (0, 2)] == theirs
    assert same >= 19  # a near tie may fall either way


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "novel.txt").write_text("Chapter 1")
    line = ["export", str(DATA / "pretrained"), "--output", str(tmp_path / "mine")]
    with pytest.raises(SystemExit, match="mine is there and holds no earlier export"):
        main(line)
    assert (tmp_path / "mine" / "novel.txt").read_text() == "Chapter 1"


def test_an_earlier_export_is_replaced(tmp_path):
    for kind in ("float32", "int8"):
        export(str(DATA / "pretrained"), output=str(tmp_path / "to"), quantization=kind)
    assert (tmp_path / "to" / "model.bin").stat().st_size < 3_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["to"]


@pytest.mark.parametrize(
    "line, said",
    [
        ("export {new}", "config.json is missing"),
        ("export {new} --format onnx", "onnx"),
        ("export {new} --quantization int3", "int3"),
    ],
)
def test_mistakes_end_with_a_sentence(line, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(line.format(new=tmp_path / "new").split())
    assert caught.value.code not in (0, None)
    printed = capsys.readouterr()
    assert said in f"{caught.value.code}{printed.err}{printed.out}"
    assert not (tmp_path / "new").exists()


def test_without_the_engine_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ImportError, match="pip install 'ctranslate2'"):
        export(str(DATA / "pretrained"), output=str(tmp_path / "to"))
