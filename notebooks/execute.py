"""Execute notebooks, slow cells included, and write what they show into them.

    python notebooks/execute.py FOLDER ...

Two run at a time, on a thread each, which is quicker than one at a time on two. Each
has a process of its own that begins with the large libraries read: to read them takes
longer than most notebooks do. Of this package it has read nothing.
"""

import contextlib
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

LIBRARIES = """
    altair vl_convert pandas datasets spacy nbdev.test torch.testing
    torch.utils.flop_counter torch.distributed.tensor torch._dynamo safetensors.torch
    torch.fx.experimental.symbolic_shapes""".split()
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(LIBRARIES)


def execute(path: Path) -> None:
    """Run a notebook in this process, top to bottom; leave the process at an error."""
    from nbdev.test import nbdev_test

    print("Executing", path, flush=True)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        nbdev_test(str(path), flags="slow", save=True, cell_timeout=0)


def run_apart(path: Path) -> bool:
    """Run a notebook in a process of its own; say whether it reached its end."""
    child = FORKS.Process(target=execute, args=(path,))
    child.start()
    child.join()
    return child.exitcode == 0


def main(folders: list[str]) -> None:
    """Run all notebooks of some folders, and stop when one of them stops."""
    paths = [p for folder in folders for p in sorted(Path(folder).glob("[0-9]*.ipynb"))]
    paths.sort(key=lambda path: "translation" not in path.name)  # it takes longest
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(max_workers=2) as threads:
        running = {threads.submit(run_apart, path): path for path in paths}
        for done in as_completed(running):
            if not done.result():
                threads.shutdown(wait=False, cancel_futures=True)
                for child in multiprocessing.active_children():
                    child.terminate()
                reason = "stopped at the error above, and the run stops with it."
                sys.exit(f"{running[done]} {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
