"""Execute notebooks, slow cells included, and write what they show into them.

    python notebooks/execute.py FOLDER ...

Two run at a time, on a thread each, which is quicker than one at a time on two. Each
has a process of its own that begins with the large libraries read: to read them takes
longer than most notebooks do. Of this package it has read nothing.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
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


def run_apart(path: Path) -> int:
    """Run a notebook in a process of its own; give that process's exit code."""
    child = FORKS.Process(target=execute, args=(path,))
    child.start()
    child.join()
    return child.exitcode


def reason(code: int) -> str:
    """Say why a notebook did not reach its end."""
    if code < 0:
        return f"was killed (signal {-code}): is there enough memory?"
    return "stopped at the error above, and the run stops with it."


def run_all(paths: list[Path]) -> None:
    """Run notebooks, and stop when one of them stops, or when asked to."""
    threads = ThreadPoolExecutor(max_workers=2)
    running = {threads.submit(run_apart, path): path for path in paths}
    try:
        for done in as_completed(running):
            if code := done.result():
                sys.exit(f"{running[done]} {reason(code)}")
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        while not all(one.done() for one in running):  # one may only now be starting
            for child in multiprocessing.active_children():
                child.terminate()
            time.sleep(0.1)


def main(folders: list[str]) -> None:
    """Run all notebooks of some folders."""
    paths = [p for folder in folders for p in sorted(Path(folder).glob("[0-9]*.ipynb"))]
    if not paths:
        sys.exit(f"there is no notebook in {' '.join(folders) or 'no folder at all'}")
    paths.sort(key=lambda path: "translation" not in path.name)  # it takes longest
    os.environ["OMP_NUM_THREADS"] = "1"
    tracker = "multiprocessing.resource_tracker"  # it complains of what was stopped
    os.environ["PYTHONWARNINGS"] = f"ignore::UserWarning:{tracker}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        run_all(paths)
    except KeyboardInterrupt:
        sys.exit("stopped")


if __name__ == "__main__":
    main(sys.argv[1:])
