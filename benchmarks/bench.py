"""Measure batching, training and decoding beside their peers: one table, in one run.

    make bench                                          the whole, on quiet cores
    .venv/bin/python benchmarks/bench.py --quick        seconds, to see that it works
    MULTI30K_DIR=folder make bench                      batches of the real corpus

Everything runs on the CPU. Within a measure the contestants take turns, round by round,
and a ratio is taken within each round: its median, least and greatest are shown.
"""

import copy
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode

from annotated_transformer.batches import Batch, TokenBatchSampler, collate
from annotated_transformer.corpora import DATA, load_corpus
from annotated_transformer.decoding import beam_search, greedy_decode
from annotated_transformer.feed_forward import Dropout
from annotated_transformer.interchange import export_ctranslate2, to_torch, vocabulary
from annotated_transformer.label_smoothing import LabelSmoothing
from annotated_transformer.masks import subsequent_mask
from annotated_transformer.model import make_model
from annotated_transformer.multi_head import MultiHeadedAttention
from annotated_transformer.recipe import PRESETS, choose_precision
from annotated_transformer.text import BytePairTokenizer, add_marks, optional
from annotated_transformer.training import make_optimizer, run_epoch, summed_loss
from annotated_transformer.translator import Translator

PLAIN = 72  # the plain loop pads every sentence to this many tokens
EXTRA = 50  # decoding may say so many words more than the source has

NOTES = """
A ratio a / b says how many times as fast a is. tokens/s: of the target, no padding.
The plain loop has the first sentences of each batch, padded to 72; in decoding it has
only the few that its row names, and no beam. GFLOP/s of training: what torch's flop
counter finds in one update (it leaves out the scores of attention), over its time.
kept: what the way forward holds for the way back, weights aside. batching: to draw and
to pad, without reading a corpus. compiled: where there is a C++ compiler. greedy, base:
without an end mark, so that every answer has the length that its row names."""


def alternate(ways: dict, rounds: int) -> dict[str, list[float]]:
    """Give the seconds that each of `ways` took in each round, after one to warm up."""
    for way in ways.values():
        way()
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def table_rows(part: str, unit: str, work: dict, seconds: dict, pairs) -> list[tuple]:
    """Turn work and seconds into speeds, and `pairs` of names into ratios of them."""
    speeds = {name: [work[name] / s for s in times] for name, times in seconds.items()}
    rows = [(f"{part}: {name}", speed, unit) for name, speed in speeds.items()]
    for a, b in pairs:
        ratio = [x / y for x, y in zip(speeds[a], speeds[b], strict=True)]
        rows.append((f"{part}: {a} / {b}", ratio, "x"))
    return rows


def read_pairs(corpus, tokenizer, longest: int = PLAIN) -> list[tuple]:
    """Encode the pairs of a split that fit into `longest` tokens."""
    sides = ([tokenizer.encode(row[s]) for s in ("de", "en")] for row in corpus)
    pairs = [[add_marks(ids, longest, drop=True) for ids in pair] for pair in sides]
    return [tuple(pair) for pair in pairs if None not in pair]


def pick_batches(pairs: list, lengths, max_tokens: int, count: int) -> list[list]:
    """Take `count` batches, evenly from the short sentences to the long ones."""
    batches = list(TokenBatchSampler(lengths, max_tokens, shuffle=False))
    places = [(2 * i + 1) * len(batches) // (2 * count) for i in range(count)]
    return [[pairs[i] for i in batches[place]] for place in places]


# --- batching -------------------------------------------------------------------------


def batching(lengths, sizes) -> list[tuple]:
    """Draw and collate batches of 4,096 tokens from so many pairs, lists of ids."""
    rows, words, me = [], list(range(3, 3 + PLAIN)), psutil.Process()
    for n in sizes:
        drawn = lengths[torch.randint(len(lengths), (n,))]  # as long as real ones
        before = most = me.memory_info().rss
        began, seen = time.perf_counter(), 0
        for batch in TokenBatchSampler(drawn, 4096):
            pairs = [(words[:s], words[:t]) for s, t in drawn[batch].tolist()]
            seen += len(collate(pairs).src)
            most = max(most, me.memory_info().rss)
        assert seen == n
        rows.append((f"batching {n:,} pairs", [time.perf_counter() - began], "s"))
        grown = max((most - before) / 2**20, 0.1)
        rows.append((f"batching {n:,} pairs: memory growth", [grown], "MB"))
    return rows


# --- training -------------------------------------------------------------------------


class TorchModel(nn.Module):
    """`nn.Transformer` with weights, embeddings and generator copied from ours."""

    def __init__(self, model):
        super().__init__()
        ours = copy.deepcopy(model)
        self.src_embed, self.tgt_embed = ours.src_embed, ours.tgt_embed
        self.proj, self.towers = ours.generator.proj, to_torch(ours)

    def forward(self, src, tgt):
        future = ~subsequent_mask(tgt.size(1))[0]
        masks = dict(tgt_mask=future, tgt_is_causal=True)
        masks |= dict(src_key_padding_mask=src == 0, tgt_key_padding_mask=tgt == 0)
        masks |= dict(memory_key_padding_mask=src == 0)
        return self.proj(self.towers(self.src_embed(src), self.tgt_embed(tgt), **masks))


def torch_trainer(model, groups, precision: str):
    """Train `nn.Transformer` with torch's own smoothed cross-entropy, fused Adam."""
    twin = TorchModel(model).train()
    optimizer, scheduler = make_optimizer(twin, 4000)
    batches = [collate(pairs) for pairs in groups]

    def train():
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = twin(batch.src, batch.tgt).flatten(0, 1)
            how = dict(ignore_index=0, label_smoothing=0.1)
            loss = F.cross_entropy(logits.float(), batch.tgt_y.flatten(), **how)
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss.item()

    return train


def our_trainer(model, groups, precision: str, compiled: bool = False):
    """Train ours as the package does."""
    model = copy.deepcopy(model)
    if compiled:
        model.compile(dynamic=True)
    criterion = LabelSmoothing(model.generator.proj.out_features, 0, 0.1)
    how = (model, criterion, *make_optimizer(model, 4000))
    batches = [collate(pairs) for pairs in groups]
    return lambda: run_epoch(batches, *how, precision=precision)


def write_out(model):
    """Copy a model as it was: attention by the five lines, torch's own dropout."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, MultiHeadedAttention):
            module.record = True
        if isinstance(module, Dropout):
            module.__class__ = nn.Dropout
    return model


def plain_trainer(model, groups):
    """Train as the text first writes it: padded to `PLAIN`, targets spelt out."""
    model = write_out(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, (0.9, 0.98), 1e-9)
    full = torch.zeros(PLAIN, dtype=torch.long)
    sides = (map(torch.tensor, side) for group in groups for side in zip(*group))
    padded = (pad_sequence([full, *side], True)[1:] for side in sides)
    batches = [Batch(src, tgt) for src, tgt in zip(padded, padded)]

    def train():
        for batch in batches:
            states = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
            log_probs = model.generator(states)  # (B, T, V), padding too
            truth = torch.full_like(log_probs, 0.1 / (log_probs.size(-1) - 2))
            truth.scatter_(2, batch.tgt_y.unsqueeze(2), 0.9)
            truth[:, :, 0] = 0
            truth[batch.tgt_y == 0] = 0
            loss = F.kl_div(log_probs, truth, reduction="sum") / batch.ntokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    return train


def products(model, positions: int, dtype):
    """Multiply matrices of the sizes of all linear layers, and nothing else."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    weights = [w.detach().T.to(dtype) for w in weights]
    sizes = {size for w in weights for size in w.shape}
    inputs = {n: torch.randn(positions, n).to(dtype) for n in sizes}
    spaces = {n: torch.empty(positions, n, dtype=dtype) for n in sizes}

    def multiply():
        for w in weights:
            torch.mm(inputs[w.size(0)], w, out=spaces[w.size(1)])

    return multiply, sum(2 * positions * w.numel() for w in weights)


def preset_model(preset: str, vocab: int, **other):
    """Build the model of a preset, some sizes aside, with tied embeddings."""
    names = ("N", "d_model", "d_ff", "h", "dropout")
    sizes = {name: PRESETS[preset][name] for name in names} | other
    return make_model(vocab, vocab, **sizes, share_embeddings=True)


def training(preset, groups, vocab, rounds, plain_rows, compiled, **other) -> list:
    """Compare training on the same batches; the plain loop has the first of each."""
    model = preset_model(preset, vocab, **other).train()
    few = [group[:plain_rows] for group in groups]
    tokens, fewer = (
        sum(len(tgt) - 1 for group in some for _, tgt in group)
        for some in (groups, few)
    )
    positions = max(collate(group).tgt.numel() for group in groups)
    ways, pairs = {"plain loop": plain_trainer(model, few)}, []
    limits, limit_work = {}, {}
    best = choose_precision("auto", torch.device("cpu"))
    for precision in dict.fromkeys(["fp32", best]):
        ours, peer = f"ours, {precision}", f"nn.Transformer, {precision}"
        ways[ours] = our_trainer(model, groups, precision)
        ways[peer] = torch_trainer(model, groups, precision)
        pairs += [(ours, peer), (ours, "plain loop")]
        if compiled:
            ways[f"{ours}, compiled"] = our_trainer(model, groups, precision, True)
            pairs += [(f"{ours}, compiled", ours), (f"{ours}, compiled", peer)]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        limits[precision], limit_work[precision] = products(model, positions, dtype)
    work = dict.fromkeys(ways, tokens) | {"plain loop": fewer}
    with FlopCounterMode(display=False) as counter:
        ways["ours, fp32"]()
    flops = counter.get_total_flops() / 1e9
    seconds = alternate(ways | limits, rounds)
    speeds = {name: seconds[name] for name in ways}
    rows = table_rows(f"training, {preset}", "tokens/s", work, speeds, pairs)
    for precision, count in limit_work.items():
        reached, limit = f"ours, {precision}", f"matrix products, {precision}"
        times = {limit: seconds[precision], reached: seconds[reached]}
        done = {limit: count / 1e9, reached: flops}
        part = f"machine, {preset}"
        rows += table_rows(part, "GFLOP/s", done, times, [(reached, limit)])
    return rows


# --- growth ---------------------------------------------------------------------------


def kept(model, criterion, batch) -> float:
    """Measure what the way forward keeps for the way back, weights aside, in MB."""
    found, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = summed_loss(model, criterion, batch, "fp32")
    assert loss.requires_grad
    return sum(space.nbytes() for space in found.values()) / 2**20


def growth(vocab: int, shapes, rounds: int) -> list[tuple]:
    """Follow time and memory of an update as sentences and batches grow."""
    model = preset_model("tiny", vocab).train()
    criterion, rows = LabelSmoothing(vocab, 0, 0.1), []
    for B, T in shapes:
        ids = torch.randint(4, vocab, (B, T + 1)).tolist()
        group = list(zip(ids, ids, strict=True))
        five_lines = write_out(model)
        ways = {
            "ours": our_trainer(model, [group], "fp32"),
            "the five lines": our_trainer(five_lines, [group], "fp32"),
            "nn.Transformer": torch_trainer(model, [group], "fp32"),
        }
        part, work = f"growth, {B} x {T} tokens", dict.fromkeys(ways, B * T)
        pairs = [("ours", "the five lines"), ("ours", "nn.Transformer")]
        rows += table_rows(part, "tokens/s", work, alternate(ways, rounds), pairs)
        for name, one in (("ours", model), ("the five lines", five_lines)):
            memory = kept(one, criterion, collate(group))
            rows.append((f"{part}: {name}, kept", [memory], "MB"))
    return rows


# --- decoding -------------------------------------------------------------------------


class Uncached:
    """Show a model without its cache: every step reads all the words so far."""

    def __init__(self, model):
        self.encode, self.decode = model.encode, model.decode
        self.generator = model.generator


def decode(model, ids: list, beam: int) -> list[list[int]]:
    """Translate by greedy search (beam 1) or beam search, like lengths together."""
    said = [None] * len(ids)
    for rows in TokenBatchSampler([(len(i), len(i)) for i in ids], 4096, shuffle=False):
        batch = Batch(pad_sequence([torch.tensor(ids[i]) for i in rows], True))
        about = (model, batch.src, batch.src_mask, batch.src.size(1) + EXTRA)
        if beam == 1:
            found = (ids[1:] for ids in greedy_decode(*about).tolist())
        else:
            how = dict(beam_size=beam, alpha=0.6, penalty="power", n_best=1)
            found = (best[0].ids for best in beam_search(*about, **how))
        for i, words in zip(rows, found, strict=True):
            said[i] = [word for word in words if word not in (0, 2)]
    return said


@torch.no_grad()
def plain_decode(model, ids: list) -> None:
    """Translate as the text first writes it: one by one, no cache, no early end."""
    for row in ids:
        batch, said = Batch(torch.tensor([row])), torch.tensor([[1]])
        memory = model.encode(batch.src, batch.src_mask)
        for _ in range(len(row) + EXTRA):
            mask = subsequent_mask(said.size(1))
            states = model.decode(memory, batch.src_mask, said, mask)
            word = model.generator(states[:, -1]).argmax(dim=-1, keepdim=True)
            said = torch.cat([said, word], dim=1)


def ctranslate2_decode(translator, folder: Path):
    """Hand the same weights to CTranslate2, in fp32, on as many threads."""
    library = optional("ctranslate2")
    threads = dict(inter_threads=1, intra_threads=torch.get_num_threads())
    how = dict(device="cpu", compute_type="float32", **threads)
    engine = library.Translator(str(export_ctranslate2(translator, folder)), **how)
    reads, says = vocabulary(translator.source), vocabulary(translator.target)
    places = {piece: i for i, piece in enumerate(says)}

    def run(ids: list, beam: int) -> list[list[int]]:
        asked = [[reads[i] for i in row[1:-1]] for row in ids]  # it adds marks itself
        how = dict(beam_size=beam, length_penalty=0.6, batch_type="tokens")
        how |= dict(max_batch_size=4096, max_decoding_length=max(map(len, ids)) + EXTRA)
        found = engine.translate_batch(asked, **how)
        return [[places[piece] for piece in one.hypotheses[0]] for one in found]

    return run


def decoding(folder: str, sentences: int, few: int, rounds: int) -> list[tuple]:
    """Compare greedy and beam-4 decoding of the same sentences by the same weights."""
    translator = Translator.load(folder, "cpu")
    settings, model = translator.config["settings"], translator.model
    corpus = load_corpus(settings["corpus"])["test"]["translation"][:sentences]
    texts = [pair[settings["source"]] for pair in corpus]
    ids = [add_marks(translator.source.encode(text)) for text in texts]
    slow, plain = f"plain loop (from {few})", write_out(model)
    with tempfile.TemporaryDirectory() as scratch:
        peer, rows = ctranslate2_decode(translator, Path(scratch, "served")), []
        for beam, part in ((1, "greedy"), (4, "beam 4")):
            ways = {
                "ours": lambda b=beam: decode(model, ids, b),
                "ours, no cache": lambda b=beam: decode(Uncached(model), ids, b),
                "CTranslate2, fp32": lambda b=beam: peer(ids, b),
            }
            work = dict.fromkeys(ways, len(ids))
            said, uncached, theirs = (way() for way in ways.values())
            if beam == 1:  # a beam of the plain kind was never written
                ways[slow], work[slow] = lambda: plain_decode(plain, ids[:few]), few
            pairs = [("ours", name) for name in list(ways)[1:]]
            seconds = alternate(ways, rounds)
            rows += table_rows(part, "sentences/s", work, seconds, pairs)
            for name, others in (("no cache", uncached), ("CTranslate2", theirs)):
                same = sum(a == b for a, b in zip(said, others, strict=True))
                same = [100 * same / len(ids)]
                rows.append((f"{part}: same answers as {name}", same, "%"))
    return rows


def longer(vocab: int, shapes, rounds: int, **other) -> list[tuple]:
    """Follow what the base model's cache saves as answers grow; none ends of itself."""
    model = preset_model("base", vocab, **other).eval()
    rows = []
    for B, T in shapes:
        src = torch.randint(4, vocab, (B, T))
        ways = {
            name: partial(greedy_decode, one, src, None, T, end_symbol=-1)
            for name, one in (("ours", model), ("ours, no cache", Uncached(model)))
        }
        part, work = f"greedy, base, {B} x {T} tokens", dict.fromkeys(ways, B * T)
        pairs = [("ours", "ours, no cache")]
        rows += table_rows(part, "tokens/s", work, alternate(ways, rounds), pairs)
    return rows


# --- all of it ------------------------------------------------------------------------


def show(rows: list[tuple]) -> None:
    """Print rows of name, values and unit: median, least and greatest."""
    print(f"{'measure':62}{'median':>12}{'min':>12}{'max':>12}  unit")
    for name, values, unit in rows:
        numbers = (statistics.median(values), min(values), max(values))
        digits = 2 if numbers[0] >= 1 else 4
        cells = "".join(f"{x:12,.{digits}f}" for x in numbers)
        print(f"{name:62}{cells}  {unit}")


def main(
    quick: bool = False,
    compile: bool = False,
    rounds: int = 5,
    translator: str = str(DATA / "pretrained"),
) -> None:
    """Print the table.

    Args:
        quick: small sizes and two rounds, to see that everything runs
        compile: train under torch.compile as well, base too and not tiny alone
        rounds: how often each contestant is timed
        translator: the run whose decoding is timed, on the test split of its corpus
    """
    torch.manual_seed(0)
    rounds = min(rounds, 2) if quick else rounds
    real = os.environ.get("MULTI30K_DIR") or (DATA / "multi30k").is_dir()
    name = "multi30k" if real else "captions"
    corpus = load_corpus(name)["train"]["translation"][: 500 if quick else None]
    texts = (row[side] for row in corpus for side in ("de", "en"))
    tokenizer = BytePairTokenizer.train(texts, 500 if quick else 8000)
    pairs, vocab = read_pairs(corpus, tokenizer), len(tokenizer)
    lengths = torch.tensor([[len(side) for side in pair] for pair in pairs])
    cores, threads = os.cpu_count(), torch.get_num_threads()
    best = choose_precision("auto", torch.device("cpu"))
    print(
        f"{cores} cores, {threads} threads, torch {torch.__version__}, best precision"
    )
    print(f"{best}; {name}, {len(pairs):,} pairs, {vocab:,} pieces; {rounds} rounds\n")
    sizes = (1000, 2000, 4000) if quick else (10_000, 100_000, 1_000_000)
    rows = batching(lengths, sizes)
    for preset, budget, count in (("base", 4096, 1), ("tiny", 1024, 8)):
        budget, count = (PLAIN, 1) if quick else (budget, count)
        groups = pick_batches(pairs, lengths, budget, count)
        few, other = (2, {"N": 1}) if quick else (64, {})
        able = preset == "tiny" and not quick and shutil.which("c++") is not None
        rows += training(preset, groups, vocab, rounds, few, compile or able, **other)
    shapes = [(8, T) for T in (16, 32, 64, 128, 256, 512)]
    shapes += [(B, 32) for B in (1, 4, 16, 64, 256)]
    rows += growth(vocab, [(2, 8), (2, 16), (4, 8)] if quick else shapes, rounds)
    rows += decoding(translator, *((20, 2) if quick else (200, 10)), rounds)
    shapes, other = [(16, 8), (16, 16), (16, 32), (64, 16)], {}
    if quick:
        shapes, other = [(2, 4), (2, 8)], {"N": 1}
    rows += longer(vocab, shapes, rounds, **other)
    show(rows)
    print(NOTES)


if __name__ == "__main__":
    tyro.cli(main)
