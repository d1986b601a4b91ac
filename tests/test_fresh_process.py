"""Importing the package is quiet, starts nothing, and needs torch alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path.stem
    for path in (ROOT / "annotated_transformer").glob("*.py")
    if not path.stem.startswith("_")
)

# Stands in for a machine with torch alone. A torchtext that was built for another
# torch is there, and fails to load.
BARE = """
import sys

class Absent:
    names = {
        "altair", "vl_convert", "pandas", "PIL", "spacy", "datasets", "tokenizers",
        "huggingface_hub", "sacrebleu", "safetensors", "tqdm", "tyro", "ctranslate2",
        "IPython",
    }

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchtext":
            raise OSError("libtorchtext.so: undefined symbol")
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(code: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter that has torch and little else."""
    return subprocess.run(
        [sys.executable, "-c", BARE + code], cwd=ROOT, capture_output=True, text=True
    )


def test_importing_any_module_is_quiet_and_starts_nothing():
    done = run(f"""
import importlib, pathlib, threading, torch
for module in {MODULES}:
    for name in [n for n in sys.modules if n.startswith("annotated_transformer")]:
        del sys.modules[name]  # so that each is imported as if it were the first
    importlib.import_module("annotated_transformer." + module)
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
children = pathlib.Path("/proc/self/task").glob("*/children")
assert not "".join(file.read_text() for file in children), "a process was started"
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_model_computes_with_torch_alone():
    done = run("""
sys.modules["numpy"] = None
import warnings
warnings.simplefilter("ignore")  # torch itself remarks on a missing numpy
import torch
from annotated_transformer.masks import make_std_mask, padding_mask
from annotated_transformer.model import make_model
model = make_model(11, 11, N=1, d_model=8, d_ff=16, h=2)
ids = torch.tensor([[1, 5, 6, 2]])
states = model(ids, ids, padding_mask(ids), make_std_mask(ids))
model.generator(states).sum().backward()
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "package, error", [("altair", "ModuleNotFoundError"), ("torchtext", "OSError")]
)
def test_the_bare_machine_really_is_bare(package, error):
    done = run(f"import {package}")
    assert done.returncode == 1 and error in done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_exported_code_does_not_ask_whether_it_is_in_a_notebook(module):
    source = (ROOT / "annotated_transformer" / f"{module}.py").read_text("utf-8")
    assert "get_ipython" not in source
