"""A model goes to the hub and comes back, with a stand-in for the hub: no network."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from annotated_transformer.corpora import DATA, snapshot
from annotated_transformer.translation import main
from annotated_transformer.translator import Translator, card

PRETRAINED = DATA / "pretrained"
pytestmark = pytest.mark.skipif(
    not PRETRAINED.is_dir(), reason="a package without the repository"
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nobody asks the real hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub in a folder: two revisions of what was uploaded."""
    asked = []

    class Api:
        def create_repo(self, repo_id, *, private=None, exist_ok=False):
            assert exist_ok
            asked.append(("create", repo_id, private))

        def upload_folder(self, *, repo_id, folder_path):
            shutil.copytree(folder_path, tmp_path / repo_id / "main")
            return f"https://hub/{repo_id}/commit/1"

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None):
        asked.append(("get", repo_id, revision))
        found, here = tmp_path / repo_id / (revision or "main"), tmp_path / "cache"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        for pattern in allow_patterns:
            for file in found.glob(pattern):
                shutil.copy(file, here)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_there_and_back(hub, tmp_path):
    ours, text = Translator.load(PRETRAINED, "cpu"), "Der Hund springt auf das Sofa."
    assert ours.push_to_hub("me/captions", private=True).endswith("commit/1")
    theirs = Translator.from_pretrained("me/captions")
    assert theirs.translate(text) == ours.translate(text) != ""
    assert theirs.config == ours.config
    assert hub == [("create", "me/captions", True), ("get", "me/captions", None)]
    names = {file.name for file in (tmp_path / "me/captions/main").iterdir()}
    expected = {"model.safetensors", "config.json", "tokenizer.json"}
    assert names == expected | {"checksums.json", "README.md"}


def test_a_revision_can_be_asked_for(hub, tmp_path):
    shutil.copytree(PRETRAINED, tmp_path / "me/model/v1")
    assert Translator.load("me/model", "cpu", revision="v1").translate("") == ""
    assert hub == [("get", "me/model", "v1")]


def test_a_folder_is_a_folder_even_if_it_looks_like_a_name(hub, tmp_path, monkeypatch):
    shutil.copytree(PRETRAINED, tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    assert Translator.load("runs/first").config["pairs"] == 10_000
    assert hub == []


def test_what_was_damaged_on_the_way_is_found_out(hub, tmp_path):
    shutil.copytree(PRETRAINED, tmp_path / "me/model/main")
    path = tmp_path / "me/model/main/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        Translator.load("me/model")


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/no.thing-1"])
def test_without_a_network_there_is_one_sentence_with_the_name(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=f"^{name} is no folder") as caught:
        Translator.load(name)
    assert "\n" not in str(caught.value)
    with pytest.raises(SystemExit, match=f"OSError: {name} is no folder"):
        main(["translate", name, "Hallo"])


def test_a_cable_that_was_pulled_is_noticed_soon(tmp_path):
    """In a process of its own, where only `tests/offline` keeps the network away."""
    code = """
import time
from annotated_transformer.corpora import snapshot
began = time.monotonic()
try:
    snapshot("a/b")
except OSError as error:
    print(error, time.monotonic() - began, sep="\\n")
"""
    where = {"PYTHONPATH": str(Path(__file__).with_name("offline"))}
    where |= {"HF_HOME": str(tmp_path), "HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=where, capture_output=True, text=True
    )
    said, seconds = done.stdout.splitlines()
    assert said.startswith("a/b is no folder, nor on the hub (")
    assert float(seconds) < 6  # left alone, the library tries again and again


def test_a_hub_that_refuses_gets_one_sentence(hub, monkeypatch):
    def refuse(self, *args, **more):
        raise RuntimeError("401\nYou need a token.")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    with pytest.raises(OSError, match=r"^me/mine did not get to the hub \(.*401\)$"):
        Translator.load(PRETRAINED).push_to_hub("me/mine")


def test_without_the_library_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    ours = Translator.load(PRETRAINED)  # a folder needs no hub
    for call in (lambda: snapshot("me/mine"), lambda: ours.push_to_hub("me/mine")):
        with pytest.raises(ImportError, match="pip install 'huggingface_hub'"):
            call()


# ---- the page about the model


def test_the_page_says_what_config_json_says(tmp_path):
    Translator.load(PRETRAINED).save_pretrained(tmp_path)
    page = (tmp_path / "README.md").read_text("utf-8")
    config = json.loads((tmp_path / "config.json").read_text())
    assert page == card(config)
    head = huggingface_hub.ModelCard(page, ignore_metadata_errors=False).data
    assert head.language == ["de", "en"] and head.license == "cc0-1.0"
    assert head.pipeline_tag == "translation"
    for part in ("captions", "10000", "d_model=128", "'beam_size': 4"):
        assert part in page
    for way in ("greedy", "test"):
        for name, signature in config[way]["signatures"].items():
            assert f"{config[way][name]:.2f}  {signature}" in page


@pytest.mark.parametrize("corpus", ["multi30k", "wmt/wmt14:de-en", "a.de,a.en"])
def test_the_page_does_not_give_away_what_belongs_to_others(corpus):
    config = json.loads((PRETRAINED / "config.json").read_text())
    config["settings"]["corpus"] = corpus
    assert "license: other\n" in card(config) and "cc0" not in card(config)


def test_a_model_that_was_never_tested_has_a_page():
    config = json.loads((PRETRAINED / "config.json").read_text())
    bare = {name: config[name] for name in ("settings", "decode", "longest")}
    assert "BLEU" not in card(bare) and "captions" in card(bare)
