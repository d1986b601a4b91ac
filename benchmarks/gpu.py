"""Train and score a translator on one GPU, with few packages and little time.

Called by gpu.sh, which says how. The corpus is read and batched without `datasets`;
all else is the package's: pieces, model, updates, checkpoints, mean, search, scores.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer import checkpoints, recipe, training
from annotated_transformer.batches import TokenBatchSampler
from annotated_transformer.corpora import DATA, MULTI30K, readers
from annotated_transformer.label_smoothing import LabelSmoothing
from annotated_transformer.pairs import survey, usable
from annotated_transformer.translator import Translator, choose_decoding, report

# Small data wants strong dropout and, with few updates to be had, a short warm-up.
FULL = dict(preset="base", corpus="multi30k", max_tokens=8192, warmup=1000, dropout=0.3)
FULL |= dict(epochs=60, patience=6, average=5, alphas=(0.6, 1.0, 1.5))
SMALL = dict(preset="tiny", N=1, d_model=32, d_ff=64, h=2, max_tokens=512, warmup=20)
SMALL |= dict(vocabulary=600, epochs=2, average=2, beam_sizes=(1, 2), alphas=(0.6,))


def describe(device: torch.device, precision: str) -> str:
    """Say what was found: processor, precision, versions."""
    if device.type == "cpu":
        return f"no GPU: CPU, {torch.get_num_threads()} threads, {precision}"
    facts = torch.cuda.get_device_properties(device)
    memory = f"{facts.total_memory / 2**30:.0f} GiB"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"{facts.name}, {memory}, {precision}, {versions}"


def wait(device: torch.device) -> None:
    """Wait until a GPU has done all that it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device, precision: str, size: int) -> float:
    """Measure what a large matrix product reaches, in FLOP/s: the best of ten."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, best = torch.randn(size, size, device=device, dtype=dtype), 0.0
    for _ in range(10):
        wait(device)
        began = time.perf_counter()
        a @ a
        wait(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


class Rows(list):
    """Rows in memory, to be read in one batch where `datasets` would give several."""

    def iter(self, batch_size: int):
        yield {"translation": [row["translation"] for row in self]}


def read_corpus(folder: Path, expected: dict | None, most: int | None = None) -> dict:
    """Read the usable pairs of each split in a folder.

    Raises: ValueError if a split is not what is expected.
    """
    corpus = {}
    for split, read in readers(folder, ("de", "en")).items():
        if expected:
            (count, *hashes), (total, _, found) = expected[split], survey(read())
            if total != count or not all(a in b for a, b in zip(found, hashes)):
                raise ValueError(f"{folder}: {split} is not that of Multi30k")
        rows = ({"translation": pair} for pair in read() if usable(pair))
        corpus[split] = Rows(itertools.islice(rows, most))
    return corpus


def load(config, rows: list[dict], units, train: bool) -> DataLoader:
    """Encode a split and batch it by tokens, as `recipe.make_loader` does."""
    sides = dict(zip((config.source, config.target), units))
    (table,) = Rows(rows).iter(len(rows))
    encoded = recipe.encode_rows(table, sides, config.max_len, train)
    pairs = zip(encoded["source"], encoded["target"])
    data = [{"source": source, "target": target} for source, target in pairs]
    lengths = torch.tensor([[len(r["source"]), len(r["target"])] for r in data])
    sampler = TokenBatchSampler(lengths, config.max_tokens, config.seed, train)
    pin = recipe.choose_device(config.device).type == "cuda"
    how = dict(batch_sampler=sampler, collate_fn=recipe.collate_rows, pin_memory=pin)
    return DataLoader(data, generator=torch.Generator(), **how)


def flops_a_token(model, batch, criterion, precision: str) -> float:
    """Count what a forward and a backward pass compute for each target token."""
    with FlopCounterMode(display=False) as counter:
        training.summed_loss(model, criterion, batch, precision).backward()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() / batch.ntokens


def learn(config, model, loaders, saves: Path, precision: str, seconds: float) -> list:
    """Train until the epochs are done, nothing improves or the time is up."""
    (train, valid), rows, losses = loaders, [], []
    V, began = model.generator.proj.out_features, time.perf_counter()
    smooth, plain = LabelSmoothing(V, 0, config.smoothing), LabelSmoothing(V, 0)
    parts = (model, *training.make_optimizer(model, config.warmup, config.factor))
    state = training.TrainState()
    how = dict(precision=precision, state=state, log=rows.append)
    while state.epoch < config.epochs:
        train.batch_sampler.set_epoch(state.epoch)
        training.run_epoch(train, model, smooth, *parts[1:], **how)
        loss, _ = training.run_epoch(valid, model, plain, precision=precision)
        state.epoch, state.batch = state.epoch + 1, 0
        checkpoints.save_checkpoint(saves, *parts, state, config.average)
        passed, losses = time.perf_counter() - began, [*losses, loss]
        print(f"epoch {state.epoch}: validation {loss:.3f} nats, {passed:.0f} s")
        stalled = len(losses) - losses.index(min(losses)) > config.patience
        if stalled or passed > seconds:
            break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few captions, anywhere")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--seconds", type=float, default=240, help="for training alone")
    asked = parser.parse_args()
    config = recipe.Config(**(SMALL if asked.small else FULL))
    device = recipe.choose_device(config.device)
    precision = recipe.choose_precision(config.precision, device)
    print(describe(device, precision))
    if device.type == "cpu" and not asked.small:
        sys.exit("torch sees no GPU: `--small` shows that all works on a CPU")
    most = peak(device, precision, 512 if asked.small else 8192)
    print(f"large matrix products: {most / 1e12:.1f} TFLOP/s")
    home = os.environ.get("MULTI30K_DIR") or DATA / "multi30k"
    small = (DATA / "captions", None, 200)
    corpus = read_corpus(*(small if asked.small else (Path(home), MULTI30K)))
    with tempfile.TemporaryDirectory() as scratch:
        recipe.learn_units(config, corpus["train"], scratch)
        units = recipe.load_units(scratch, config.units)
        splits = (("train", True), ("validation", False))
        loaders = [load(config, corpus[split], units, train) for split, train in splits]
        torch.manual_seed(config.seed)
        model = recipe.build_model(config, *units).to(device).train()
        criterion = LabelSmoothing(len(units[1]), 0, config.smoothing)
        batch = next(iter(loaders[0])).to(device)
        cost = flops_a_token(model, batch, criterion, precision)
        if asked.compile:
            model.compile(dynamic=True)
        saves = Path(scratch, "checkpoints")
        rows = learn(config, model, loaders, saves, precision, asked.seconds)
        saved = checkpoints.list_checkpoints(saves)
        checkpoints.average_checkpoints(model, saved)
    longest = int(loaders[0].batch_sampler.lengths[:, 0].max())
    facts = {"settings": vars(config), "decode": {}, "longest": longest}
    translator = Translator(model, *units, facts)
    choose_decoding(translator, corpus["validation"], config.beam_sizes, config.alphas)
    speeds = [row["tokens_per_second"] for row in rows]
    speed, size = statistics.median(speeds), sum(p.numel() for p in model.parameters())
    print(f"\n{len(rows)} updates of {size:,} weights")
    print(f"training: {speed:,.0f} target tokens/s, the median of an update")
    print(f"share of the peak: {100 * speed * cost / most:.1f} %")
    print(report("test, greedy", translator.evaluate(corpus["test"], beam_size=1)))
    print(report(f"test, {facts['decode']}", translator.evaluate(corpus["test"])))


if __name__ == "__main__":
    main()
