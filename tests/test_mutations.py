"""Each check in a notebook can fail: put a known mistake in, and some cell notices.

A mutation is a phrase of an exported cell, what a mistake would make of it, and what
that mistake is. The notebook's cells then run in order, with the mistake, up to the
first that fails. If none does, the notebook's checks are too weak for what it teaches.
"""

import json
import os
import re
import sys
import traceback
import types
import warnings
from multiprocessing import Pipe
from operator import itemgetter
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from test_notebooks import FORKS

ROOT = Path(__file__).parents[1]
PICTURES = ("altair", "annotated_transformer.charts")  # nothing is drawn here
UNSHOWN = ("#| slow", "#| cuda", "#| eval: false")
FILES = re.compile(r"tempfile\.|\bopen\(|\.write_")
SLIPS = r"\n(SyntaxError|IndentationError|NameError|UnboundLocalError|ImportError):"

# By notebook: (what the mistake is, the phrase, what it becomes).
MUTATIONS = {
    "attention": [
        ("no scale", " / math.sqrt(query.size(-1))", ""),
        ("scale d_k, no root", "math.sqrt(query.size(-1))", "query.size(-1)"),
        (
            "mask the wrong way up",
            "masked_fill(~mask, torch",
            "masked_fill(mask, torch",
        ),
        ("a constant too large for fp16", "torch.finfo(scores.dtype).min", "-1e9"),
        ("a constant too small", "torch.finfo(scores.dtype).min", "-10.0"),
        ("a dead row looks at all", "weights.masked_fill(~mask, 0.0)", "weights"),
        ("dropout ignored", "weights = dropout(weights)", "pass"),
        ("softmax over the queries", "softmax(dim=-1)", "softmax(dim=-2)"),
        ("scores for weights", "@ value, weights  #", "@ value, scores  #"),
    ],
    "multi_head": [
        (
            "heads cut by view, without transposing",
            "x.view(B, T, h, width // h).transpose(1, 2)",
            "x.view(B, h, T, width // h)",
        ),
        ("heads joined untransposed", "x.transpose(1, 2).reshape(", "x.reshape("),
        (
            "all heads share the first one's projection",
            ".transpose(1, 2)  # (B, h, T, d_k)",
            ".transpose(1, 2)[:, :1].expand(-1, h, -1, -1)",
        ),
        ("values projected as keys", "self.w_v(value)", "self.w_k(value)"),
        ("queries projected as keys", "self.w_q(query)", "self.w_k(query)"),
        ("values taken from the query", "self.w_v(value)", "self.w_v(query)"),
        ("no projection of the output", "self.w_o(x.transpose", "(x.transpose"),
        ("mask not passed on", "look(q, k, v, mask,", "look(q, k, v, None,"),
        ("mask without an axis for heads", "mask.unsqueeze(1)", "mask"),
        ("fused: dropout in use", "drop.p if drop.training else 0.0", "drop.p"),
        ("fused: no dropout", "drop.p if drop.training else 0.0", "0.0"),
        ("explicit: no dropout", "(q, k, v, mask, drop)", "(q, k, v, mask)"),
        (
            "weights not recorded",
            "return output, weights.detach()",
            "return output, None",
        ),
        ("h need not divide", "if h < 1 or d_model % h:", "if h < 1:"),
        (
            "cache does not grow",
            "if self.key is not None:\n            key =",
            "if False:\n            key =",
        ),
        ("cache: new words first", "[self.key, key]", "[key, self.key]"),
        ("cache of the memory grows", "is not None and not self.grows", "is None"),
        (
            "cache keeps its rows",
            "self.key = self.key.index_select(0, rows)",
            "pass",
        ),
    ],
    "masks": [
        ("padding has another id", "(ids != pad)", "(ids != 1)"),
        ("padding: the wrong way up", "(ids != pad)", "(ids == pad)"),
        ("padding hidden as a query", "unsqueeze(-2)", "unsqueeze(-1)"),
        ("one future token leaks", ".tril()", ".tril(diagonal=1)"),
        ("a position cannot see itself", ".tril()", ".tril(diagonal=-1)"),
        ("only the future is seen", ".tril()", ".triu()"),
        ("either mask will do", "(tgt, pad) & sub", "(tgt, pad) | sub"),
        ("pad ignored in a target", "padding_mask(tgt, pad)", "padding_mask(tgt)"),
    ],
    "feed_forward": [
        ("no ReLU", "self.w_1(x).relu()", "self.w_1(x)"),
        ("another bend", "self.w_1(x).relu()", "nn.functional.gelu(self.w_1(x))"),
        ("no dropout", "self.dropout(self.w_1", "(self.w_1"),
        (
            "dropout twice",
            "self.dropout(self.w_1(x)",
            "self.dropout(self.dropout(self.w_1(x))",
        ),
        (
            "dropout behind the second map",
            "self.w_2(self.dropout(self.w_1(x).relu()))",
            "self.dropout(self.w_2(self.w_1(x).relu()))",
        ),
        ("its own rate of dropout", " Dropout(dropout)", " Dropout(0.1)"),
        ("dropped: too few", "round(self.p * 2**16)", "round(self.p * 2**15)"),
        ("dropped: all but that share", "(draws >= cut", "(draws < cut"),
        ("dropped: half of the draws unused", "cut - 2**15", "cut"),
        ("dropped: only positive draws", "random_(-(2**63), None)", "random_()"),
        ("dropped, not scaled up", ".mul_(2**16 / (2**16 - cut))", ""),
        ("dropped in use", "self.training and 0 <", "0 <"),
        ("no bias", "nn.Linear(d_ff, d_model)", "nn.Linear(d_ff, d_model, bias=False)"),
    ],
    "layers": [
        (
            "unbiased deviation, eps outside the root",
            "F.layer_norm(x, self.gain.shape, self.gain, self.bias, self.eps)",
            "self.gain * (x - x.mean(-1, keepdim=True))"
            " / (x.std(-1, keepdim=True) + self.eps) + self.bias",
        ),
        ("eps too large", "self.eps = eps", "self.eps = 100 * eps"),
        ("no gain", "self.gain, self.bias,", "None, self.bias,"),
        ("no bias", "self.gain, self.bias,", "self.gain, None,"),
        ("norm moved", "if self.norm_first:", "if not self.norm_first:"),
        ("always pre-norm", "if self.norm_first:", "if True:"),
        ("pre-norm: no residual", "return x + self.dropout(", "return self.dropout("),
        ("post-norm: no residual", "self.norm(x + self", "self.norm(self"),
        (
            "pre-norm: a norm on the road",
            "return x + self",
            "return self.norm(x) + self",
        ),
        (
            "pre-norm: no dropout",
            "self.dropout(sublayer(self.norm",
            "(sublayer(self.norm",
        ),
        ("post-norm: no dropout", "self.dropout(sublayer(x))", "sublayer(x)"),
        (
            "dropout over the sum",
            "self.norm(x + self.dropout(sublayer(x)))",
            "self.norm(self.dropout(x + sublayer(x)))",
        ),
        ("clones: one object", "copy.deepcopy(module) for", "module for"),
        ("clones: equal weights", "part.reset_parameters()", "pass"),
        ("encoder: mask ignored", "(x, x, x, mask)", "(x, x, x)"),
        ("encoder: always pre-norm", "dropout, norm_first), 2)", "dropout), 2)"),
        ("decoder: always pre-norm", "dropout, norm_first), 3)", "dropout), 3)"),
        (
            "encoder: one sub-layer's norm for both",
            "self.sublayer[1](x, self.feed_forward)",
            "self.sublayer[0](x, self.feed_forward)",
        ),
        ("decoder: looks ahead", "(x, x, x, tgt_mask, past)", "(x, x, x, None, past)"),
        ("decoder: forgets the past", "tgt_mask, past)", "tgt_mask)"),
        ("decoder: source mask ignored", "m, m, src_mask,", "m, m, None,"),
        ("decoder: looks at itself for the memory", "(x, m, m, src", "(x, x, x, src"),
        ("decoder: values from itself", "(x, m, m, src_mask", "(x, m, x, src_mask"),
        (
            "decoder: one attention for both",
            "self.src_attn(x, m",
            "self.self_attn(x, m",
        ),
    ],
    "embeddings": [
        ("no scale", " * math.sqrt(self.d_model)", ""),
        ("scale squared", "math.sqrt(self.d_model)", "self.d_model"),
        ("rows too large", "std=self.d_model**-0.5", "std=1.0"),
        ("rows too small", "std=self.d_model**-0.5", "std=0.01"),
        (
            "sine and cosine swapped",
            "angle.sin()\n        pe[:, 1::2] = angle[:, : self.d_model // 2].cos()",
            "angle.cos()\n        pe[:, 1::2] = angle[:, : self.d_model // 2].sin()",
        ),
        ("sines only", "// 2].cos()", "// 2].sin()"),
        ("i in place of 2i", "pair = torch.arange(0,", "pair = 0.5 * torch.arange(0,"),
        ("waves too short", "math.log(10000.0)", "math.log(1000.0)"),
        ("odd widths", "angle[:, : self.d_model // 2].cos()", "angle.cos()"),
        ("start ignored", "self.pe[:, start:end]", "self.pe[:, : x.size(1)]"),
        ("table does not grow", "if end > self.pe.size(1):", "if False:"),
        ("table grows in another precision", "(end).to(self.pe)", "(end)"),
        ("table saved", "persistent=False", "persistent=True"),
        ("no dropout", "self.dropout(x + self", "(x + self"),
        (
            "dropout of positions only",
            "self.dropout(x + self.pe",
            "x + self.dropout(self.pe",
        ),
        (
            "positions replace the words",
            "self.dropout(x + self",
            "self.dropout(0 * x + self",
        ),
    ],
    "model": [
        (
            "encoder: no final norm",
            "x = layer(x, mask)\n        return self.norm(x)",
            "x = layer(x, mask)\n        return x",
        ),
        (
            "decoder: no final norm",
            "tgt_mask, pair)\n        return self.norm(x)",
            "tgt_mask, pair)\n        return x",
        ),
        (
            "encoder: mask dropped on the way",
            "x = layer(x, mask)",
            "x = layer(x, None)",
        ),
        (
            "decoder: source mask dropped",
            "memory, src_mask, tgt_mask, pair",
            "memory, None, tgt_mask, pair",
        ),
        (
            "decoder: target mask dropped",
            "src_mask, tgt_mask, pair",
            "src_mask, None, pair",
        ),
        ("decoder: never sees the memory", "layer(x, memory, src", "layer(x, x, src"),
        (
            "decoder: all floors use one cache",
            "tgt_mask, pair)\n",
            "tgt_mask, pairs[0])\n",
        ),
        ("cache: the past is not followed", "past.select(rows)", "pass"),
        ("cache: the memory is not followed", "source.select(sentences)", "pass"),
        ("cache: positions start again", "0 if cache is None else cache.length", "0"),
        ("no softmax", ".log_softmax(dim=-1)", ""),
        ("softmax without its logarithm", ".log_softmax(", ".softmax("),
        ("softmax over positions", ".log_softmax(dim=-1)", ".log_softmax(dim=0)"),
        (
            "source read with the target's table",
            "self.src_embed(src)",
            "self.tgt_embed(src)",
        ),
        (
            "source mask not passed on",
            "self.src_embed(src), src_mask",
            "self.src_embed(src), None",
        ),
        ("no Xavier", "    _draw_matrices(model)\n    if", "    if"),
        ("Xavier, but normal", "init.xavier_uniform_", "init.xavier_normal_"),
        ("not tied", "    if share_embeddings:\n", "    if False:\n"),
        ("generator not tied", "generator.proj.weight = tgt_embed", "tgt_embed"),
        (
            "encoder: norm_first ignored",
            "attn(), ff, dropout, norm_first), N)\n    decoder",
            "attn(), ff, dropout), N)\n    decoder",
        ),
        (
            "decoder: norm_first ignored",
            "attn(), attn(), ff, dropout, norm_first",
            "attn(), attn(), ff, dropout",
        ),
        (
            "heads ignored",
            "MultiHeadedAttention, h, d_model, dropout",
            "MultiHeadedAttention, 8, d_model, dropout",
        ),
        (
            "attention: dropout ignored",
            "MultiHeadedAttention, h, d_model, dropout",
            "MultiHeadedAttention, h, d_model",
        ),
        (
            "feed-forward: dropout ignored",
            "(d_model, d_ff, dropout)",
            "(d_model, d_ff)",
        ),
        ("d_ff ignored", "(d_model, d_ff, dropout)", "(d_model, 4 * d_model, dropout)"),
        (
            "vocabularies exchanged",
            "in (src_vocab, tgt_vocab)",
            "in (tgt_vocab, src_vocab)",
        ),
    ],
    "schedule": [
        ("max for min", "min(step**-0.5", "max(step**-0.5"),
        ("one step ahead", "step = max(step, 1)", "step = step + 1"),
        ("step 0 divides by zero", "step = max(step, 1)", "pass"),
        ("wider is faster", "d_model**-0.5", "d_model**0.5"),
        ("width ignored", "factor * d_model**-0.5 *", "factor *"),
        ("warm-up too steep", "warmup**-1.5", "warmup**-1.0"),
        ("factor ignored", "return factor * ", "return "),
    ],
    "label_smoothing": [
        ("size - 1", "(log_probs.size(-1) - 2)", "(log_probs.size(-1) - 1)"),
        (
            "padding gets a share",
            "log_probs[:, :pad].sum(-1) + log_probs[:, pad + 1 :].sum(-1)",
            "log_probs.sum(-1)",
        ),
        (
            "the right word gets a share",
            "pad + 1 :].sum(-1) - right",
            "pad + 1 :].sum(-1)",
        ),
        ("padded rows counted", ".masked_fill(target == pad, 0.0)", ""),
        ("mean for sum", "target == pad, 0.0).sum()", "target == pad, 0.0).mean()"),
        ("entropy of the right word left out", "(math.log(sure) - right)", "(-right)"),
        ("entropy of the rest left out", "smoothing * math.log(share) - ", "-"),
        ("slope: the right word's lost", "(-sure * slope)", "(-share * slope)"),
        (
            "slope: of the wrong sign",
            "(-share * slope).expand",
            "(share * slope).expand",
        ),
        ("slope: padding is a word", "slopes[:, pad], ", ""),
        ("slope: padded rows counted", ", slopes[target == pad] = 0, 0", " = 0"),
        ("slope: what comes back ignored", "-share * slope)", "-share + 0 * slope)"),
        ("any number of words", "if log_probs.size(-1) != self.size:", "if False:"),
        ("no smoothing is NaN", "if share > 0:", "if True:"),
    ],
    "batches": [
        ("no shift", "self.tgt = tgt[:, :-1]", "self.tgt = tgt[:, 1:]"),
        (
            "asked for what goes in",
            "self.tgt_y = tgt[:, 1:]",
            "self.tgt_y = tgt[:, :-1]",
        ),
        ("padding counted", "int((self.tgt_y != pad).sum())", "self.tgt_y.numel()"),
        (
            "tokens that go in counted",
            "(self.tgt_y != pad).sum()",
            "(self.tgt != pad).sum()",
        ),
        (
            "the future not hidden",
            "make_std_mask(self.tgt, pad)",
            "padding_mask(self.tgt, pad)",
        ),
        (
            "source mask for other padding",
            "padding_mask(src, pad)",
            "padding_mask(src, pad + 1)",
        ),
        (
            "budget ignores the longer side",
            "enumerate(lengths[order].amax(dim=1)",
            "enumerate(lengths[order].amin(dim=1)",
        ),
        (
            "budget without padding",
            "longest = max(longest, length)",
            "longest = length",
        ),
        (
            "one sentence over the budget",
            "(i + 1 - first) * longest",
            "(i - first) * longest",
        ),
        (
            "the last batch lost",
            "return [*cuts, order[first:]] if first < len(order) else cuts",
            "return cuts",
        ),
        (
            "a sentence lost at each cut",
            "first, longest = i, length",
            "first, longest = i + 1, length",
        ),
        (
            "not sorted",
            "order = order[lengths[order, side].argsort(stable=True)]",
            "pass",
        ),
        ("every epoch the same", "self.seed + epoch if", "self.seed if"),
        (
            "start ignored",
            "[self.rank : even : self.world][start:]",
            "[self.rank : even : self.world]",
        ),
        (
            "every process the same",
            "batches[self.rank : even : self.world]",
            "batches[: even : self.world]",
        ),
        (
            "processes of unequal length",
            "(len(batches) % self.world if self.shuffle else 0)",
            "0",
        ),
        ("padding with something else", "padding_value=pad", "padding_value=pad + 1"),
    ],
    "training": [
        (
            "mean of means",
            "loss * (processes / max(tokens, 1))",
            "loss / batch.ntokens / len(group)",
        ),
        ("never divided", "loss * (processes / max(tokens, 1))", "loss"),
        (
            "divided by sentences",
            "loss * (processes / max(tokens, 1))",
            "loss / samples",
        ),
        ("gradients kept", "optimizer.zero_grad(set_to_none=True)", "pass"),
        (
            "an update for every small batch",
            "total += loss.detach()\n",
            "total += loss.detach()\n        optimizer.step()\n",
        ),
        (
            "rate moves with every small batch",
            "total += loss.detach()\n",
            "total += loss.detach()\n        scheduler and scheduler.step()\n",
        ),
        ("rate never moves", "scheduler.step()", "pass"),
        (
            "rate moves before the weights do",
            "    optimizer.step()\n",
            "    scheduler and scheduler.step()\n    optimizer.step()\n",
        ),
        ("rate one update behind", "rate(done + 1,", "rate(done,"),
        ("no clipping", "if clip is not None:", "if False:"),
        (
            "no look at the loss",
            "if not math.isfinite(loss + norm.item()):",
            "if False:",
        ),
        (
            "a look at the loss after the step",
            "    if not math.isfinite(loss + norm.item()):",
            "    optimizer.step()\n    if not math.isfinite(loss + norm.item()):",
        ),
        ("groups of one", "islice(batches, accum_iter)", "islice(batches, 1)"),
        ("trains on what goes in", "batch.tgt_y[real])", "batch.tgt[real])"),
        ("always bf16", 'enabled=precision == "bf16"', "enabled=True"),
        ("never bf16", 'enabled=precision == "bf16"', "enabled=False"),
        ("measures updates, too", "if optimizer is None:", "if False:"),
        ("the loss of the last update", 'loss += row["loss"]', 'loss = row["loss"]'),
    ],
    "checkpoints": [
        (
            "written in place",
            '    new, old = aside / "new",',
            "    new, old = folder,",
        ),
        (
            "half a folder left behind",
            "shutil.rmtree(aside, ignore_errors=True)",
            "pass",
        ),
        ("checksums ignored", ".hexdigest() != right:", ".hexdigest() == 0:"),
        ("another shape", "if weights[name].shape != p.shape:", "if False:"),
        ("not a number", "if not weights[name].isfinite().all():", "if False:"),
        (
            "random state forgotten",
            "torch.set_rng_state(random)",
            "pass",
        ),
        (
            "Adam's moments forgotten",
            "dict(state=adam, param",
            "dict(state={}, param",
        ),
        ("schedule forgotten", "scheduler.load_state_dict(schedule)", "pass"),
        ("weights forgotten", "    load_weights(model, path)  # all", "    # all"),
        ("where it stood forgotten", 'TrainState(**rest["state"])', "TrainState()"),
        ("all checkpoints kept", "list_checkpoints(folder)[:-keep]", "[]"),
        (
            "the newest thrown away",
            "list_checkpoints(folder)[:-keep]",
            "list_checkpoints(folder)[keep:]",
        ),
        ("sum for mean", " / len(folders)", ""),
    ],
    "greedy": [
        (
            "the padding of the source is read",
            "decode(self.memory, self.src_mask,",
            "decode(self.memory, None,",
        ),
        ("starts from padding", "if start_symbol == pad:", "if False:"),
        ("starts with nothing", "ids[:, 0] = start_symbol", "pass"),
        (
            "ended sentences go on",
            "rows = rows[live]\n            next_word.select(live, live)",
            "pass",
        ),
        (
            "the memory of another sentence",
            "            next_word.select(live, live)\n",
            "",
        ),
        ("one word short", "range(1, 1 + max_len)", "range(1, max_len)"),
        ("no stop when all have ended", "if len(rows) == 0:", "if False:"),
        (
            "something else behind the end",
            "1 + max_len), pad)",
            "1 + max_len), start_symbol)",
        ),
        ("answers with the first position", "states[:, -1]", "states[:, 0]"),
        ("the least likely word", "max(dim=-1)", "min(dim=-1)"),
        (
            "cache given all words again",
            "ids[:, -1:], None, self.cache",
            "ids, None, self.cache",
        ),
    ],
    "decoding": [
        ("length penalty off by one", "(5 + length) / 6 if", "(6 + length) / 6 if"),
        ("penalties exchanged", 'if kind == "gnmt" else', 'if kind != "gnmt" else'),
        ("alpha ignored", "else length) ** alpha", "else length)"),
        (
            "length counts the start mark",
            "score(log_prob, t)",
            "score(log_prob, t + 1)",
        ),
        (
            "scores not divided",
            "lambda p, length: p / over[length]",
            "lambda p, length: p",
        ),
        (
            "stops at the first answers",
            "(size == 1 or found[-1].score >= bound)",
            "True",
        ),
        ("bound by the present length", "score(best, max_len)", "score(best, t)"),
        (
            "bound met by the best answer",
            "found[-1].score >= bound",
            "found[0].score >= bound",
        ),
        (
            "beam extends what has ended",
            "on = (word == end).int().argsort(dim=1, stable=True)",
            "on = place.new_tensor(range(place.size(1))).expand(n, -1)",
        ),
        ("what ends far down the beam counts", ")[:, :size].nonzero()", ").nonzero()"),
        ("too few to choose from", "min(2 * size, width * V)", "min(size, width * V)"),
        ("a parent of another sentence", "each * width + place // V", "place // V"),
        (
            "only the last word counts",
            "scores.unsqueeze(-1) + log_probs",
            "0 * scores.unsqueeze(-1) + log_probs",
        ),
        (
            "answers in the order found",
            "found.sort(key=lambda one: -one.score)",
            "pass",
        ),
        ("worst first", "key=lambda one: -one.score", "key=lambda one: one.score"),
        (
            "cache does not follow the beam",
            "next_word.select(rows[stay].flatten(), left)",
            "next_word.select(rows[stay].flatten().sort().values, left)",
        ),
        (
            "another sentence's memory",
            "left = None if len(keep) == len(alive) else stay",
            "left = None",
        ),
        (
            "cut answers called finished",
            "Hypothesis(h, score(p, max_len), False)",
            "Hypothesis(h, score(p, max_len), True)",
        ),
    ],
    "text": [
        ("room for one mark only", "max_len - 2", "max_len - 1"),
        (
            "end mark cut off",
            "[START, *ids[:room], END]",
            "[START, *ids, END][:max_len]",
        ),
        ("no end mark", "[START, *ids[:room], END]", "[START, *ids[:room]]"),
        ("too long and kept", "None if drop and len(ids) > room", "None if False"),
        (
            "unknown words are left out",
            "in self.pieces(text))",
            "in self.pieces(text) if word in self.ids)",
        ),
        ("rare words kept", "min_freq=min_freq", "min_freq=1"),
        (
            "letters taken apart",
            'unicodedata.normalize("NFC"',
            'unicodedata.normalize("NFD"',
        ),
        ("what nobody sees stays", "kind(c) not in out)", "kind(c))"),
        ("blanks as they come", ", text).split())", ', text).split(" "))'),
    ],
    "words": [
        (
            "no weak endings",
            'strong in ("e", "es")) else "en"',
            'strong in ("e", "es")) else "e"',
        ),
        ("the adjective never shows the case", "weak = strong", "pass"),
        ("all words are masculine", '"p" if many else gender.lower()', '"m"'),
        ("ein is always silent", "and not silent:", "and silent:"),
        ("consonants not doubled", r'r"\1\2\2ing"', r'r"\1\2ing"'),
        ("y stays", r'r"\1ies"', r'r"\1ys"'),
    ],
    "captions": [
        (
            "test sentences trained on",
            "rest = rows[:10_000], rows[10_000:]",
            "rest = rows[:10_000], rows[9_900:]",
        ),
    ],
    "pairs": [
        (
            "stops at the shorter side",
            "enumerate(zip_longest(*sides), 1)",
            "enumerate(zip(*sides), 1)",
        ),
        ("says nothing, and counts", 'not in ("", "@@")', 'not in ("",)'),
        ("another encoding", 'raw.decode("utf-8")', 'raw.decode("latin-1")'),
        ("a web page taken for data", "if re.match(rb", "if False and re.match(rb"),
        ("offset within the line", "at = offset + error.start", "at = error.start"),
        (
            "lines cut at any separator",
            'yield raw.decode("utf-8").rstrip("\\r\\n")',
            'yield from raw.decode("utf-8").splitlines()',
        ),
        ("text not compared", "if sha not in known:", "if False:"),
        ("a binary file let through", 'if b"\\0" in head', "if False"),
    ],
    "corpora": [
        (
            "the test split is trained on",
            '"train": ("train",),',
            '"train": ("test",),',
        ),
        (
            "held-out pairs stay in training",
            'corpus["train"], corpus[split] = parts["train"], parts["test"]',
            'corpus[split] = parts["test"]',
        ),
    ],
    "recipe": [
        ("embeddings never tied", "= source is target", "= False"),
        ("h need not divide", "if config.d_model % config.h:", "if False:"),
        (
            "preset not filled in",
            "for name, value in PRESETS[self.preset].items():",
            "for name, value in ():",
        ),
    ],
}
LEFT_OUT = {  # cells that take long, and what builds on them
    "training": r"\b(runs|curves)\b",
    "text": r"\b(unseen|shares|rare|strange)\b",
    "recipe": r"\b(corpus|loader)\b",
}
# Too long to be run once more unharmed, which test_notebooks.py does anyway.
TOO_LONG = {"layers", "greedy", "captions"}


def cells_of(stem: str) -> list[str]:
    """Read the code cells of the notebook of that name, whatever its number."""
    (path,) = (ROOT / "notebooks").glob(f"[0-9]*[0-9]_{stem}.ipynb")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    cells = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    cells = [cell for cell in cells if not cell.startswith(UNSHOWN)]
    left_out = re.compile(LEFT_OUT.get(stem, "$^"))
    return [c for c in cells if c.startswith("#| export") or not left_out.search(c)]


def mutate(cells: list[str], old: str, new: str) -> int:
    """Put `new` in place of `old`, in place, and say in which cell.

    Raises: ValueError if `old` does not occur exactly once in the exported cells.
    """
    found = [i for i, cell in enumerate(cells) if cell.startswith("#| export")]
    found = [i for i in found for _ in range(cells[i].count(old))]
    if len(found) != 1:
        raise ValueError(f"{len(found)} times in exported cells, not once: {old!r}")
    cells[found[0]] = cells[found[0]].replace(old, new)
    return found[0]


class Rows(list):
    """Stands in for `charts.Live`: rows that are not drawn."""

    def __init__(self, draw):
        super().__init__()

    def show(self):
        pass


def first_failure(cells: list[str], notebook, start: int) -> tuple[int, str] | None:
    """Run cells from `start` on; give the first that fails, with what it said."""
    for number, cell in enumerate(cells[start:], start):
        try:
            exec(compile(cell, f"cell {number}", "exec"), vars(notebook))
        except Exception:
            return number, traceback.format_exc(limit=-1)
    return None


def in_a_fork(work, *args):
    """Do work in a fork of this process, and give what it gives."""
    receiver, answer = Pipe(duplex=False)
    if os.fork() == 0:
        try:
            answer.send(work(*args))
        finally:
            os._exit(0)
    answer.close()
    try:
        return receiver.recv()
    finally:
        os.wait()


def execute(cells: list[str], mutants: list[tuple], whole: bool, folder, answer):
    """Run a notebook in a process of its own, and each of its mutants in a fork.

    What stands before a mutant's cell is the same for all, and is run once; but what
    has written files is not shared. Answers the first failures of the mutants, in
    their order, and that of the notebook, if it is to be run `whole`.
    """
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.chdir(folder)
    sys.modules.update({name: MagicMock() for name in PICTURES})
    sys.modules[PICTURES[1]].Live = Rows
    notebook = sys.modules["notebook"] = types.ModuleType("notebook")
    files = (number for number, cell in enumerate(cells) if FILES.search(cell))
    shared, done, found = min(files, default=len(cells)), 0, []
    for place, mutant in mutants:
        end = min(place, shared)
        if failure := first_failure(cells[:end], notebook, done):
            return answer.send((found, failure))  # it fails as it is
        done = max(done, end)
        found.append(in_a_fork(first_failure, mutant, notebook, done))
    answer.send((found, first_failure(cells, notebook, done) if whole else None))


def failures(stem: str, mutants: list[tuple], folder: Path):
    """Give the first failures of a notebook's mutants, and that of the notebook."""
    receiver, answer = FORKS.Pipe(duplex=False)
    parts = (cells_of(stem), mutants, stem not in TOO_LONG, str(folder), answer)
    child = FORKS.Process(target=execute, args=parts)
    child.start()
    answer.close()
    try:
        return receiver.recv()
    finally:
        child.join()


@pytest.mark.parametrize("stem", MUTATIONS)
def test_each_mistake_is_noticed(stem, tmp_path):
    mutants = []
    for why, old, new in MUTATIONS[stem]:
        place = mutate(cells := cells_of(stem), old, new)
        mutants.append((place, cells, why))
    mutants.sort(key=itemgetter(0))
    found, unharmed = failures(stem, [mutant[:2] for mutant in mutants], tmp_path)
    assert unharmed is None, "it fails as it is"
    missed = []
    for (place, _, why), failure in zip(mutants, found, strict=True):
        number, said = failure or (None, "no cell notices")
        deep = f"cell {place}" in said and re.search(SLIPS, said)
        if number in (None, place) or deep:  # deep or there, it is no program
            missed.append(f"{why}: {said}")
    assert missed == []


def test_the_phrase_must_be_there_once():
    cells = ["x = 2", "#| export\nx = 1\ny = 1"]
    for phrase in ("1", "2"):
        with pytest.raises(ValueError, match="not once"):
            mutate(cells, phrase, "3")
    assert mutate(cells, "x = 1", "x = 3") == 1
    assert cells == ["x = 2", "#| export\nx = 3\ny = 1"]
