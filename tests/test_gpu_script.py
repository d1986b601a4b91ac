"""The script for a GPU runs on a bare machine; here on a CPU, as there is no GPU."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from annotated_transformer import recipe
from annotated_transformer.corpora import load_corpus
from annotated_transformer.recipe import Config, learn_units, load_units, make_loader

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)

# What a machine with torch, tokenizers, safetensors and sacrebleu alone does not have.
ABSENT = """datasets pyarrow huggingface_hub altair vl_convert pandas PIL tyro spacy
torchtext tqdm ctranslate2 nbdev fastcore IPython""".split()
BARE = f"""
import sys
class Bare:
    def __init__(self, finders):
        self.finders = finders
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {ABSENT}:
            found = (f.find_spec(name, path, target) for f in self.finders)
            return next((spec for spec in found if spec), None)
sys.meta_path[:] = [Bare([*sys.meta_path])]
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Run the script from elsewhere, in an interpreter that starts bare."""
    (folder / "sitecustomize.py").write_text(BARE)
    bare = {name: v for name, v in os.environ.items() if name != "MULTI30K_DIR"}
    bare |= dict(PYTHON=sys.executable, PYTHONPATH=str(folder), OMP_NUM_THREADS="1")
    command = [ROOT / "benchmarks" / "gpu.sh", *options]
    where = dict(cwd=folder, env=bare | {"CUDA_VISIBLE_DEVICES": ""})
    return subprocess.run(command, capture_output=True, text=True, **where)


def test_it_trains_and_scores_on_a_bare_machine(tmp_path):
    done = run(tmp_path, "--small")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout
    assert said.startswith("no GPU: CPU, 1 threads, ")
    losses = [float(x) for x in re.findall(r"validation ([\d.]+) nats", said)]
    assert len(losses) == 2 and losses[1] < losses[0]
    speed = re.search(r"training: ([\d,]+) target tokens/s", said)
    share = re.search(r"share of the peak: ([\d.]+) %", said)
    assert int(speed[1].replace(",", "")) > 0 and 0 < float(share[1]) < 100
    assert said.index("no GPU") < said.index("epoch 1")
    assert said.count("nrefs:1|case:mixed|eff:no|tok:13a") == 2
    assert "tokenised" not in said  # spaCy is really not there


def test_the_bare_machine_is_bare(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    for name in ABSENT:
        code = f"import importlib.util as u; assert not u.find_spec({name!r})"
        where = dict(env=os.environ | {"PYTHONPATH": str(tmp_path)})
        subprocess.run([sys.executable, "-c", code], check=True, **where)


def test_without_a_gpu_the_real_run_ends_with_a_sentence(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "torch sees no GPU" in done.stderr


def test_its_batches_are_those_of_the_package(tmp_path):
    rows = load_corpus("captions")["train"].select(range(300))
    config = Config(vocabulary=600, max_tokens=256, max_len=40)
    learn_units(config, rows, tmp_path)
    units = load_units(tmp_path, "pieces")
    for train in (True, False):
        ours = gpu.load(config, list(rows), units, train)
        theirs = make_loader(config, rows, units, train)
        assert len(ours) > 3
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.src, b.src) and torch.equal(a.tgt_y, b.tgt_y)


def test_flops_are_those_of_the_matrices():
    """A weight costs two operations a token forwards and four backwards."""
    sizes = dict(preset="tiny", N=1, d_model=32, d_ff=64, h=2, dropout=0.0)
    tokenizer = [None] * 50
    model = recipe.build_model(Config(**sizes), tokenizer, tokenizer)
    rows = [{"source": [1, 5, 6, 2], "target": [1, 7, 8, 9, 2]}] * 3
    batch = recipe.collate_rows(rows)
    found = gpu.flops_a_token(model, batch, gpu.LabelSmoothing(50, 0, 0.1), "fp32")
    square, inner = 32 * 32, 2 * 32 * 64
    encoder, decoder = 4 * square + inner, 6 * square + inner + 32 * 50
    memory = 2 * square  # keys and values of the source, in the decoder
    expected = 6 * (4 * (encoder + memory) + 4 * decoder) / 4
    assert expected <= found < 1.1 * expected  # and a little for the scores
    assert all(p.grad is None for p in model.parameters())


def test_another_text_is_not_taken_for_multi30k(tmp_path):
    for side, text in {"de": "Ein Hund.\n@@\n", "en": "A dog.\nA cat.\n"}.items():
        (tmp_path / f"train.{side}").write_text(text)
    shas = [
        hashlib.sha256((tmp_path / f"train.{side}").read_bytes()).hexdigest()
        for side in ("de", "en")
    ]
    rows = gpu.read_corpus(tmp_path, {"train": (2, *shas)})["train"]
    assert rows == [{"translation": {"de": "Ein Hund.", "en": "A dog."}}]
    for wrong in ((3, *shas), (2, *shas[::-1])):
        with pytest.raises(ValueError, match="train is not that of Multi30k"):
            gpu.read_corpus(tmp_path, {"train": wrong})


def test_training_ends_when_time_is_up_or_nothing_improves(tmp_path, monkeypatch):
    rows = gpu.Rows(load_corpus("captions")["train"].select(range(60)))
    sizes = dict(N=1, d_model=32, d_ff=64, h=2, max_tokens=512, max_len=60)
    config = Config(**sizes, vocabulary=400, epochs=9, patience=2, average=3)
    learn_units(config, rows, tmp_path)
    units = load_units(tmp_path, "pieces")
    loaders = [gpu.load(config, rows, units, train) for train in (True, False)]

    def epochs(seconds):
        model, folder = recipe.build_model(config, *units), tmp_path / str(seconds)
        done = gpu.learn(config, model, loaders, folder, "fp32", seconds)
        return len(done) / len(loaders[0])

    assert epochs(0) == 1
    real = gpu.training.run_epoch

    def stuck(batches, model, criterion, optimizer=None, *rest, **more):
        loss, state = real(batches, model, criterion, optimizer, *rest, **more)
        return (loss if optimizer else 5.0), state

    monkeypatch.setattr(gpu.training, "run_epoch", stuck)
    assert epochs(1000) == 3


def test_a_gpu_is_described(monkeypatch):
    """A fake for the one call that asks; what is computed there is not covered."""
    facts = type("Facts", (), dict(name="NVIDIA X", total_memory=141 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    said = gpu.describe(torch.device("cuda"), "bf16")
    assert said.startswith("NVIDIA X, 141 GiB, bf16, torch ")
