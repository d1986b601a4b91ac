"""Exercises: solutions run, gaps are red, and each mistake has its sentence.

A wrong answer is a phrase of a solution's marked regions, what a mistake would make
of it, and what the checks must then say. The cells run in order up to the first that
fails, without the reward at the end.
"""

import json
import re
import shutil
import types
import warnings
from pathlib import Path

import pytest
from test_notebooks import code_lines, output_complaints, run_apart, words

ROOT = Path(__file__).parents[1]
SOLUTIONS = sorted((ROOT / "notebooks/solutions").glob("*.ipynb"))
STEMS = [path.stem for path in SOLUTIONS]
REGION = re.compile(
    r"^( *)### BEGIN SOLUTION ([^\n]+)\n.*?### END SOLUTION$", re.M | re.S
)

# By notebook: (what the mistake is, the phrase, what it becomes, what the checks say).
WRONG = {
    "1_attention": [
        ("no scale", " / math.sqrt(query.size(-1))", "", "The scale is missing"),
        (
            "no root",
            "math.sqrt(query.size(-1))",
            "query.size(-1)",
            "divide by d_k, and",
        ),
        ("scaled up", "key.mT / math", "key.mT * math", "You multiply by √d_k"),
        ("root of S", "query.size(-1)", "key.size(-2)", "root of the number of keys"),
        ("root of T", "query.size(-1)", "query.size(-2)", "root of the number of quer"),
        ("rows of keys", "query @ key.mT", "key @ query.mT", "has a row for each key"),
        ("no return", "return query @", "query @", "is there a return?"),
        (
            "softmax over the queries",
            "return grown / grown.sum(dim=-1, keepdim=True)",
            "return scores.softmax(dim=-2)",
            "Your columns sum to 1",
        ),
        (
            "softmax over all",
            "grown.sum(dim=-1, keepdim=True)",
            "grown.sum()",
            "All weights together sum to 1",
        ),
        (
            "no exponent",
            "(scores - scores.amax(dim=-1, keepdim=True)).exp()",
            "scores",
            "raise e to each",
        ),
        (
            "no keepdim",
            "grown.sum(dim=-1, keepdim=True)",
            "grown.sum(dim=-1)",
            "sums of other rows",
        ),
        (
            "axes from the front",
            "return grown / grown.sum(dim=-1, keepdim=True)",
            "return scores.softmax(dim=1)",
            "You count axes from the front",
        ),
        (
            "overflow",
            "(scores - scores.amax(dim=-1, keepdim=True)).exp()",
            "scores.exp()",
            "e^1000 is infinite",
        ),
        (
            "underflow",
            "scores.amax(dim=-1, keepdim=True)",
            "scores.max()",
            "the largest score of all",
        ),
        ("mask upside down", "(~mask, torch", "(mask, torch", "the wrong way round"),
        (
            "hidden by 0",
            "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
            "scores * mask",
            "e^0 is 1",
        ),
        ("in place", "scores.masked_fill(~", "scores.masked_fill_(~", "without _"),
        (
            "result lost",
            "return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
            "scores.masked_fill(~mask, -1e9)\n    return scores",
            "You hide nothing",
        ),
        (
            "hidden by -20",
            "torch.finfo(scores.dtype).min",
            "-20.0",
            "keep a little weight",
        ),
        (
            "hidden by -1e9",
            "torch.finfo(scores.dtype).min",
            "-1e9",
            "Half precision ends",
        ),
        (
            "minus infinity",
            "torch.finfo(scores.dtype).min",
            "-math.inf",
            "with minus infinity",
        ),
        (
            "attention without scale",
            "scores = score(query, key)",
            "scores = query @ key.mT",
            "are not divided by √d_k",
        ),
        (
            "keys weighed",
            "weights @ value,",
            "weights @ key,",
            "weights weigh the keys",
        ),
        (
            "weights first",
            "return weights @ value, weights",
            "return weights, weights @ value",
            "You return the weights first",
        ),
        ("scores returned", "@ value, weights", "@ value, scores", "return scores"),
        ("one of two", "@ value, weights", "@ value", "returns two things"),
        ("mask ignored", "hide(scores, mask)", "scores", "hide after the softmax"),
        (
            "mask ignored altogether",
            "if mask is not None:\n        scores = hide(scores, mask)\n"
            "    weights = softmax(scores)\n    if mask is not None:",
            "weights = softmax(scores)\n    if False:",
            "does not look at its mask",
        ),
        (
            "a dead row looks at all",
            "weights.masked_fill(~mask, 0.0)",
            "weights",
            "gets the mean of all values",
        ),
        (
            "no dropout",
            "weights = dropout(weights)",
            "pass",
            "does not use its dropout",
        ),
        (
            "output dropped",
            "weights = dropout(weights)\n",
            "return dropout(weights @ value), weights\n",
            "You drop features of the output",
        ),
        (
            "scores dropped",
            "scores = score(query, key)  # (..., T, S)",
            "scores = (dropout or (lambda x: x))(score(query, key)); dropout = None",
            "You drop scores",
        ),
    ],
    "2_several_heads": [
        (
            "split by view alone",
            "x.view(x.size(0), x.size(1), h, -1).transpose(1, 2)",
            "x.view(x.size(0), h, x.size(1), -1)",
            "view alone has cut the sentence",
        ),
        (
            "not transposed",
            "h, -1).transpose(1, 2)",
            "h, -1)",
            "The heads stand behind the words",
        ),
        (
            "dealt like cards",
            "x.view(x.size(0), x.size(1), h, -1).transpose(1, 2)",
            "x.view(x.size(0), x.size(1), -1, h).permute(0, 3, 1, 2)",
            "deal out the features like cards",
        ),
        (
            "joined untransposed",
            "x.transpose(1, 2).reshape",
            "x.reshape",
            "the words are mixed",
        ),
        (
            "joined by view",
            "x.transpose(1, 2).reshape",
            "x.transpose(1, 2).view",
            "view cannot merge axes",
        ),
        (
            "interleaved",
            "x.transpose(1, 2).reshape",
            "x.permute(0, 2, 3, 1).reshape",
            "Your heads are interleaved",
        ),
        (
            "a list of projections",
            "        self.w_v, self.w_o = nn.Linear(d_model, d_model), "
            "nn.Linear(d_model, d_model)\n",
            "        self.rest = [nn.Linear(d_model, d_model) for _ in range(2)]\n",
            "a list would hide them",
        ),
        (
            "one projection used twice",
            "self.w_q, self.w_k = nn.Linear(d_model, d_model), "
            "nn.Linear(d_model, d_model)",
            "self.w_q = self.w_k = nn.Linear(d_model, d_model)",
            "one and the same nn.Linear",
        ),
        (
            "narrow projections",
            "self.w_q, self.w_k = nn.Linear(d_model, d_model), ",
            "self.w_q, self.w_k = nn.Linear(d_model, d_model // h), ",
            "one wide projection serves all heads",
        ),
        ("any h will do", "if d_model % h:", "if False:", "raise a ValueError"),
        ("no w_o", "self.w_o(join(x))", "join(x)", "The heads' outputs are not mixed"),
        (
            "queries as keys",
            "self.w_q(query)",
            "self.w_k(query)",
            "queries go through w_k",
        ),
        ("keys as queries", "self.w_k(key)", "self.w_q(key)", "keys go through w_q"),
        (
            "values as keys",
            "self.w_v(value)",
            "self.w_k(value)",
            "values go through w_k",
        ),
        (
            "value from query",
            "self.w_v(value)",
            "self.w_v(query)",
            "come from the query",
        ),
        ("value from key", "self.w_v(value)", "self.w_v(key)", "come from the key"),
        (
            "one head",
            "self.h, self.dropout = h,",
            "self.h, self.dropout = 1,",
            "attend as a single head",
        ),
        ("mask ignored", "(q, k, v, mask,", "(q, k, v, None,", "do not look at their"),
        (
            "mask upside down",
            "mask.unsqueeze(1)",
            "~mask.unsqueeze(1)",
            "the wrong way round",
        ),
        (
            "no axis for heads",
            "mask.unsqueeze(1)",
            "mask",
            "for each head what it should hide for each sentence",
        ),
        ("no dropout", "v, mask, self.dropout)", "v, mask)", "nothing is dropped"),
    ],
    "3_encoder": [
        (
            "n - 1",
            "centred.square().mean(dim=-1, keepdim=True)",
            "x.var(dim=-1, keepdim=True)",
            "You divide by n - 1",
        ),
        (
            "eps outside the root",
            "(variance + self.eps).sqrt()",
            "(variance.sqrt() + self.eps)",
            "You add eps outside the root",
        ),
        (
            "both",
            "(variance + self.eps).sqrt()",
            "(x.std(-1, keepdim=True) + self.eps)",
            "You divide by n - 1 (var and std",
        ),
        ("no root", "self.eps).sqrt()", "self.eps)", "You divide by the variance"),
        ("no eps", "(variance + self.eps)", "variance", "eps is missing"),
        ("no gain", "self.gain * centred", "centred", "The gain is missing"),
        ("no bias", ".sqrt() + self.bias", ".sqrt()", "The bias is missing"),
        (
            "not centred",
            "self.gain * centred",
            "self.gain * x",
            "The mean is not subtracted",
        ),
        (
            "over the words",
            "centred = x - x.mean(dim=-1, keepdim=True)\n"
            "        variance = centred.square().mean(dim=-1, keepdim=True)",
            "centred = x - x.mean(dim=1, keepdim=True)\n"
            "        variance = centred.square().mean(dim=1, keepdim=True)",
            "You take the mean over the words",
        ),
        (
            "no residual",
            "return x + self.dropout(sub",
            "return self.dropout(sub",
            "The residual is missing",
        ),
        (
            "post-norm",
            "x + self.dropout(sublayer(self.norm(x)))",
            "self.norm(x + self.dropout(sublayer(x)))",
            "You norm after the sum",
        ),
        ("no norm", "sublayer(self.norm(x))", "sublayer(x)", "The norm is missing"),
        (
            "the road is normed",
            "return x + self.dropout(sublayer(self.norm(x)))",
            "x = self.norm(x)\n        return x + self.dropout(sublayer(x))",
            "The road itself is normed",
        ),
        (
            "the answer is normed",
            "sublayer(self.norm(x))",
            "self.norm(sublayer(x))",
            "You norm what the sub-layer says",
        ),
        (
            "dropout over the sum",
            "x + self.dropout(sublayer(self.norm(x)))",
            "self.dropout(x + sublayer(self.norm(x)))",
            "x itself loses features",
        ),
        (
            "no dropout",
            "self.dropout(sublayer(self.norm(x)))",
            "sublayer(self.norm(x))",
            "Nothing is dropped",
        ),
        (
            "one connection",
            "clones(SublayerConnection(size, dropout), 2)",
            "nn.ModuleList([SublayerConnection(size, dropout)] * 2)",
            "share one connection",
        ),
        (
            "a list of connections",
            "clones(SublayerConnection(size, dropout), 2)",
            "[SublayerConnection(size, dropout) for _ in 'ab']",
            "PyTorch does not see your connections",
        ),
        ("no mask", "(x, x, x, mask)", "(x, x, x)", "does not look at its mask"),
        (
            "think first",
            "x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))\n"
            "        return self.sublayer[1](x, self.feed_forward)",
            "x = self.sublayer[0](x, self.feed_forward)\n"
            "        look = lambda x: self.self_attn(x, x, x, mask)\n"
            "        return self.sublayer[1](x, look)",
            "You think before you look",
        ),
        (
            "no feed-forward",
            "return self.sublayer[1](x, self.feed_forward)",
            "return x",
            "Feed-forward is missing",
        ),
        (
            "the first connection twice",
            "self.sublayer[1](x",
            "self.sublayer[0](x",
            "Both sub-layers use the first connection",
        ),
        ("the x of the floor", "lambda x: self", "lambda n: self", "the lambda's own"),
        (
            "only the query",
            "lambda x: self.self_attn(x, x, x, mask)",
            "lambda n: self.self_attn(n, x, x, mask)",
            "Only the query",
        ),
        (
            "shared floors",
            "clones(layer, N)",
            "nn.ModuleList([layer] * N)",
            "with shared weights",
        ),
        (
            "equal floors",
            "clones(layer, N)",
            "nn.ModuleList(__import__('copy').deepcopy(layer) for _ in range(N))",
            "begin with equal weights",
        ),
        ("too few", "clones(layer, N)", "clones(layer, N - 1)", "There are 2 floors"),
        (
            "a plain list",
            "clones(layer, N)",
            "[*clones(layer, N)]",
            "must be an nn.Mod",
        ),
        (
            "no final norm",
            "return self.norm(x)\n",
            "return x\n",
            "final norm is missing",
        ),
        (
            "from the bottom again",
            "for layer in self.layers:\n            x = layer(x, mask)\n"
            "        return self.norm(x)",
            "for layer in self.layers:\n            y = layer(x, mask)\n"
            "        return self.norm(y)",
            "starts from the bottom again",
        ),
        ("mask lost", "layer(x, mask)", "layer(x, None)", "do not get the mask"),
    ],
    "4_training": [
        ("no shift", "tgt[:, 1:]", "tgt[:, :-1]", "The shift is zero: what goes in"),
        (
            "no shift, later",
            "tgt[:, :-1]",
            "tgt[:, 1:]",
            "zero: both begin with the sec",
        ),
        (
            "the wrong way",
            "tgt[:, :-1], tgt[:, 1:]",
            "tgt[:, 1:], tgt[:, :-1]",
            "You shift the wrong way",
        ),
        ("the wrong axis", "tgt[:, 1:]", "tgt[1:]", "one column less"),
        (
            "padding counted",
            "int((asked != pad).sum())",
            "asked.numel()",
            "Padding is counted: a blank",
        ),
        ("<s> counted", "(asked != pad)", "(tgt != pad)", "<s> is counted"),
        (
            "counted in what goes in",
            "(asked !=",
            "(goes_in !=",
            "count in what is asked",
        ),
        ("a sum", "[real].mean()", "[real].sum()", "do not divide by the number"),
        (
            "all rows divide",
            "[real].mean()",
            "[real].sum() / len(real)",
            "you divide by all",
        ),
        (
            "padding in the mean",
            "[real].mean()",
            ".mean()",
            "Padding is counted: what the",
        ),
        ("the sign", "-(wanted * log", "(wanted * log", "The sign is wrong"),
        ("no smoothing", "smoothing / (V - 2)", "0.0", "The other words get nothing"),
        (
            "plain cross-entropy",
            "-(wanted * log_probs).sum(dim=-1)[real].mean()",
            "F.nll_loss(log_probs, asked, ignore_index=pad)",
            "Nothing is smoothed",
        ),
        (
            "as torch smooths",
            "-(wanted * log_probs).sum(dim=-1)[real].mean()",
            "F.cross_entropy(log_probs, asked, ignore_index=pad, "
            "label_smoothing=smoothing)",
            "among all V words, as torch does",
        ),
        ("V - 1", "(V - 2)", "(V - 1)", "You divide ε by V - 1"),
        ("V", "smoothing / (V - 2)", "smoothing / V", "You divide ε by V:"),
        ("padding's share", "wanted[:, pad] = 0", "pass", "Padding gets a share"),
        (
            "KL",
            "-(wanted * log_probs)",
            "(wanted * (wanted.clamp(min=1e-30).log() - log_probs))",
            "This is the KL divergence",
        ),
        ("max", "min(step", "max(step", "min, not max"),
        (
            "no warm-up",
            "min(step**-0.5, step * warmup**-1.5)",
            "step**-0.5",
            "only falls",
        ),
        ("no width", "factor * d_model**-0.5", "factor", "The width is missing"),
        ("width upside down", "d_model**-0.5", "d_model**0.5", "has the wrong sign"),
        ("no factor", "return factor * d_model", "return d_model", "factor is missing"),
        ("exponent", "warmup**-1.5", "warmup**-0.5", "exponent of the warm-up"),
        ("no backward", "loss.backward()", "pass", "There are no gradients"),
        ("no step", "optimizer.step()", "pass", "Nothing moves"),
        ("no new rate", "scheduler.step()", "pass", "The rate never changes"),
        ("no zero_grad", "optimizer.zero_grad()", "pass", "still there, and add up"),
        (
            "cleared too late",
            "optimizer.zero_grad()\n    loss = compute_loss()\n    loss.backward()",
            "loss = compute_loss()\n    loss.backward()\n    optimizer.zero_grad()",
            "after backward has made them",
        ),
        (
            "cleared twice",
            "loss.backward()",
            "loss.backward()\n    optimizer.zero_grad(set_to_none=False)",
            "after backward has made them",
        ),
        (
            "cleared at the end",
            "optimizer.zero_grad()\n    loss = compute_loss()\n    loss.backward()\n"
            "    optimizer.step()",
            "loss = compute_loss()\n    loss.backward()\n    optimizer.step()\n"
            "    optimizer.zero_grad()",
            "You clear at the end",
        ),
        (
            "step before backward",
            "loss.backward()\n    optimizer.step()",
            "optimizer.step()\n    loss.backward()",
            "steps before backward",
        ),
        (
            "scheduler first",
            "optimizer.step()\n    scheduler.step()",
            "scheduler.step()\n    optimizer.step()",
            "The scheduler moves before",
        ),
        ("a tensor", "loss.item()", "loss", "still a tensor"),
        ("no loss", "return loss.item()", "pass", "The loss is not returned"),
    ],
    "5_inference": [
        (
            "from padding",
            "torch.tensor([[start]])",
            "torch.tensor([[0]])",
            "from padding",
        ),
        ("no end", "if word == end:", "if False:", "You go on behind the end mark"),
        (
            "looking ahead",
            "decode(memory, src_mask, said, subsequent_mask(length))\n        word",
            "decode(memory, src_mask, said, None)\n        word",
            "Your decoder looks ahead",
        ),
        (
            "padding seen",
            "model.decode(memory, src_mask, said",
            "model.decode(memory, None, said",
            "looks at the padding of the source",
        ),
        (
            "the first position",
            "model.generator(states[:, -1]).argmax",
            "model.generator(states[:, 0]).argmax",
            "You ask at the first position",
        ),
        (
            "the last word only",
            "src_mask, said, subsequent_mask(length))\n        word",
            "src_mask, said[:, -1:], None)\n        word",
            "gets the last word only",
        ),
        ("argmin", ".argmax(dim", ".argmin(dim", "the least probable word"),
        (
            "no generator",
            "model.generator(states[:, -1]).argmax",
            "states[:, -1].argmax",
            "among the features of the state",
        ),
        (
            "no start",
            "return said[0]",
            "return said[0, 1:]",
            "The start mark is missing",
        ),
        (
            "no end mark",
            "return said[0]",
            "return said[0, :-1]",
            "The end mark is missing",
        ),
        (
            "read again and again",
            "states = model.decode(memory, src_mask, said",
            "states = model.decode(model.encode(src, src_mask), src_mask, said",
            "You read the source again",
        ),
        (
            "one too few",
            "range(1, max_len + 1):\n        states",
            "range(1, max_len):\n        states",
            "one word too few",
        ),
        (
            "one too many",
            "range(1, max_len + 1):\n        states",
            "range(1, max_len + 2):\n        states",
            "one word too many",
        ),
        ("no alpha", "((5 + length) / 6) ** alpha", "(5 + length) / 6", "α is missing"),
        (
            "alpha above",
            "((5 + length) / 6) ** alpha",
            "(5 + length) ** alpha / 6",
            "belongs to the whole fraction",
        ),
        ("power", "((5 + length) / 6) **", "length **", "This is the other penalty"),
        ("brackets", "((5 + length) / 6)", "(5 + length / 6)", "The sum comes first"),
        (
            "no penalty",
            "answers += [(p / penalty(length, alpha), ids)",
            "answers += [(p, ids)",
            "The penalty is missing",
        ),
        (
            "multiplied",
            "answers += [(p / penalty",
            "answers += [(p * penalty",
            "You multiply by the penalty",
        ),
        (
            "the start counted",
            "p / penalty(length, alpha)",
            "p / penalty(length + 1, alpha)",
            "You count the start mark",
        ),
        (
            "the end not counted",
            "p / penalty(length, alpha)",
            "p / penalty(length - 1, alpha)",
            "You leave the end mark out",
        ),
        (
            "only the last word's",
            "torch.tensor([[p] for p, _ in beam]) + log_probs",
            "log_probs",
            "Only the last word counts",
        ),
        (
            "beginnings and words mixed up",
            "[*beam[i // V][1], i % V]",
            "[*beam[i % len(beam)][1], i % V]",
            "behind its beginning",
        ),
        (
            "one beginning goes on",
            "if ids[-1] != end][:beam_size]",
            "if ids[-1] != end][:1]",
            "is any beginning dropped",
        ),
        (
            "a beam of one",
            "memory, beam, answers = ",
            "beam_size = 1\n    memory, beam, answers = ",
            "You find what greedy finds",
        ),
        (
            "the first answer",
            "if answers and max(answers)[0] >= beam[0][0] / penalty(max_len, alpha):",
            "if answers:",
            "You stop at the first answers",
        ),
        (
            "four answers",
            "if answers and max(answers)[0] >= beam[0][0] / penalty(max_len, alpha):",
            "if len(answers) >= beam_size:",
            "You stop at the first answers",
        ),
        (
            "what has ended goes on",
            "if ids[-1] != end][:beam_size]",
            "][:beam_size]",
            "leaves the beam",
        ),
        ("worst first", ", reverse=True)", ")", "Your best answer is not the first"),
        (
            "cut off first",
            "sorted(answers or cut",
            "sorted(answers + cut",
            "no end mark",
        ),
        (
            "nothing",
            "return sorted(answers",
            "return []\n    return sorted(a",
            "no answer",
        ),
    ],
}


def cells_of(stem: str, folder: str = "solutions") -> list[str]:
    """The code of a notebook, without the reward at the end."""
    path = ROOT / "notebooks" / folder / f"{stem}.ipynb"
    code = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if source.startswith("## The reward"):
            return code
        if cell["cell_type"] == "code":
            code.append(source)
    raise ValueError(f"{path} has no reward")


def mistaken(cells: list[str], old: str, new: str) -> list[str]:
    """Put `new` in place of `old`, which must be in the marked regions, and once."""
    regions = [match[0] for cell in cells for match in REGION.finditer(cell)]
    found = sum(region.count(old) for region in regions)
    if found != 1:
        raise ValueError(f"{found} times in marked regions, not once: {old!r}")

    def change(region: re.Match) -> str:
        return region[0].replace(old, new)

    return [REGION.sub(change, cell) for cell in cells]


def first_failure(cells: list[str]) -> str:
    """Run cells in order, and give what the first that fails says, or nothing."""
    notebook = types.ModuleType("notebook")
    with warnings.catch_warnings(action="ignore"):
        for number, cell in enumerate(cells):
            try:
                exec(compile(cell, f"cell {number}", "exec"), vars(notebook))
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return ""


LIST = [(stem, *one) for stem, some in WRONG.items() for one in some]
NAMES = [f"{stem}: {why}" for stem, why, *_ in LIST]


@pytest.mark.parametrize(("stem", "why", "old", "new", "sentence"), LIST, ids=NAMES)
def test_a_mistake_has_its_sentence(stem, why, old, new, sentence):
    said = first_failure(mistaken(cells_of(stem), old, new))
    assert said.startswith("Wrong: ") and sentence in said, said


@pytest.mark.parametrize("path", SOLUTIONS, ids=STEMS)
def test_a_solution_runs_top_to_bottom(path, tmp_path):
    folder = tmp_path / "notebooks" / "solutions"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run_apart(Path(shutil.copy(path, folder)), tmp_path / "log")


@pytest.mark.parametrize("stem", STEMS)
def test_each_gap_asks_to_be_filled(stem):
    """Also when all the others are."""
    cells = cells_of(stem)
    asked = [match[2] for cell in cells for match in REGION.finditer(cell)]
    assert 2 <= len(asked) <= 6
    gaps = [f"NotImplementedError: {ask}" for ask in asked]
    assert first_failure(cells_of(stem, "exercises")) == gaps[0]
    for ask, gap in zip(asked, gaps, strict=True):
        cleared = [
            re.sub(
                rf"### BEGIN SOLUTION {re.escape(ask)}\n.*?### END SOLUTION",
                f"raise NotImplementedError({ask!r})",
                cell,
                flags=re.S,
            )
            for cell in cells
        ]
        assert first_failure(cleared) == gap


def shown_by(cells: list[str]) -> str:
    """Run cells as Jupyter does, up to the first that fails, and give what is shown."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell()
    with capture_output() as shown:
        for cell in cells:
            if not shell.run_cell(cell).success:
                break
    return re.sub(r"\x1b\[\d+m", "", shown.stdout + shown.stderr).strip()


def test_an_empty_exercise_is_red_and_says_what_to_write():
    said = shown_by(cells_of("1_attention", "exercises"))
    assert "NotImplementedError: Write score:" in said.splitlines()[-1]


def test_a_mistake_shows_its_sentence_and_no_trace():
    cells = mistaken(cells_of("1_attention"), " / math.sqrt(query.size(-1))", "")
    said = shown_by(cells)
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last == "Not yet: The scale is missing: divide by √d_k (notebook 01)."


def test_exercises_and_solutions_are_in_step():
    def cells(folder: str, stem: str) -> list[dict]:
        path = ROOT / "notebooks" / folder / f"{stem}.ipynb"
        return json.loads(path.read_text("utf-8"))["cells"]

    for stem in STEMS:
        pairs = zip(cells("exercises", stem), cells("solutions", stem), strict=True)
        for gap, full in pairs:
            assert gap["id"] == full["id"] and not gap.get("outputs")
            if "SOLUTION" not in "".join(full["source"]):
                assert gap["source"] == full["source"]
            else:
                assert "NotImplementedError" in "".join(gap["source"])


@pytest.mark.parametrize("path", SOLUTIONS, ids=STEMS)
def test_keeps_to_the_limits(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    sources = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    prose = "\n\n".join(source for source, kind in sources if kind == "markdown")
    code = [code_lines(source) for source, kind in sources if kind == "code"]
    assert re.match(r"# Exercise \d: [^\n]+\n\n> [^\n]+", sources[0][0])
    assert words(prose) <= 1200
    assert max(len(lines) for lines in code) <= 30
    for link in re.findall(r"\]\(([^)#:]+\.ipynb)", prose):
        assert (path.parent / link).exists(), f"a link to nowhere: {link}"
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    assert [fault for out in outputs for fault in output_complaints(out)] == []


def test_the_phrase_must_be_there_once():
    cells = ["x = 1", "### BEGIN SOLUTION Write y.\ny = 2\nz = 2\n### END SOLUTION"]
    for phrase in ("1", "2"):
        with pytest.raises(ValueError, match="not once"):
            mistaken(cells, phrase, "3")
    assert "y = 3" in mistaken(cells, "y = 2", "y = 3")[1]
