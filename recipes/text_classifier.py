"""A transformer encoder that tells which package of the standard library a few lines of Python come from.

    trimaran train recipes/text_classifier.py --procs 2

Minutes on two CPU cores. Needs the extra `recipes` for the baseline: a logistic regression on TF-IDF
weights of character n-grams, trained on the same files and judged by the same snippets, printed beside ours. No file
is in both training and validation. Shapes: B samples, T pieces, G n-grams of a piece, D width, H heads, C classes.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trimaran as tm

# Tests are written in one style for all packages; encodings are tables.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "site-packages", "__pycache__"}
SHORTEST_FILE, FEWEST_FILES = 20, 8  # lines of a file, files of a package
SHORTEST, LONGEST = 3, 10  # lines of a snippet
PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|_+|[^\w\s]|[^\W\d_]+")  # of getHTTPError2: get, HTTP, Error, 2
PADDING, UNKNOWN = 0, 1
NUM_GRAMS, GRAM_ROWS = 8, 32_768


@dataclass(frozen=True)
class File:
    """A source file: its path below the library, the index of its package, its lines that are not blank."""

    path: str
    label: int
    lines: tuple[str, ...]


def read_packages(root: Path) -> tuple[list[str], list[File]]:
    """Names of the packages that have enough files, and these."""
    names, files = [], []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name not in LEFT_OUT):
        texts = {}
        for path in sorted(folder.rglob("*.py")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            below = path.relative_to(root)
            if len(lines) >= SHORTEST_FILE and not LEFT_OUT.intersection(below.parts):
                texts[below.as_posix()] = tuple(line for line in lines if line.strip())
        if len(texts) >= FEWEST_FILES:
            files += [File(path, len(names), lines) for path, lines in texts.items()]
            names.append(folder.name)
    return names, files


def split_by_file(files: Sequence[File], valid: float) -> tuple[list[File], list[File]]:
    """(train, valid): of each package's files, in an order by hash, the share `valid` is held out."""
    sides: tuple[list[File], list[File]] = ([], [])
    for label in sorted({file.label for file in files}):
        own = [file for file in files if file.label == label]
        own.sort(key=lambda file: hashlib.sha256(file.path.encode()).digest())
        held_out = max(1, round(valid * len(own)))
        sides[0].extend(own[held_out:])
        sides[1].extend(own[:held_out])
    return sides


def cut(file: File) -> Iterator[str]:
    """The file as snippets one after the other, 3 to 10 lines each: the same ones every time."""
    draw, at = random.Random(file.path), 0
    while at < len(file.lines):
        length = draw.randint(SHORTEST, LONGEST)
        yield "\n".join(file.lines[at : at + length])
        at += length


class Tokenizer:
    """Cuts text into pieces of words. A piece is an index, and the hashes of its character n-grams.

    Only pieces of two training files or more have an index of their own: one that a single file has tells the file,
    not the package. The n-grams say something of the others.
    """

    def __init__(self, files: Sequence[File]) -> None:
        in_files = Counter(piece for file in files for piece in set(PIECE.findall("\n".join(file.lines))))
        common = sorted(piece for piece, count in in_files.items() if count >= 2)
        self.index = {piece: UNKNOWN + 1 + at for at, piece in enumerate(common)}

    @property
    def size(self) -> int:
        return UNKNOWN + 1 + len(self.index)

    def __call__(self, text: str, drop: float = 0.0) -> dict[str, Tensor]:
        """pieces [T] and grams [T · G], of which the share `drop` is replaced by an unknown piece without n-grams."""
        pieces, grams = [], []
        for piece in PIECE.findall(text):
            dropped = drop > 0 and random.random() < drop
            pieces.append(UNKNOWN if dropped else self.index.get(piece, UNKNOWN))
            grams.extend([PADDING] * NUM_GRAMS if dropped else hash_grams(piece))
        return {"pieces": torch.tensor(pieces), "grams": torch.tensor(grams)}


@cache
def hash_grams(piece: str) -> list[int]:
    """Rows of the first n-grams of three to five characters, filled up with padding."""
    text = f"<{piece.lower()}>"
    grams = [text[at : at + n] for n in (3, 4, 5) for at in range(max(1, len(text) - n + 1))][:NUM_GRAMS]
    rows = [1 + zlib.crc32(gram.encode()) % (GRAM_ROWS - 1) for gram in grams]
    return rows + [PADDING] * (NUM_GRAMS - len(rows))


class Crops:
    """Random snippets of the training files, new ones in each epoch, with pieces dropped.

    A file gives as many as the cube root of its lines, so that a few long files do not stand for their package.
    What is random is drawn from `random`, which the loader seeds for each (seed, epoch, sample).
    """

    def __init__(self, files: Sequence[File], tokenizer: Tokenizer, drop: float) -> None:
        self.places = [file for file in files for _ in range(round(len(file.lines) ** (1 / 3)))]
        self.tokenizer = tokenizer
        self.drop = drop

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file = self.places[index]
        length = random.randint(SHORTEST, LONGEST)
        start = random.randint(0, max(0, len(file.lines) - length))
        text = "\n".join(file.lines[start : start + length])
        return self.tokenizer(text, self.drop) | {"label": torch.tensor(file.label)}

    def fingerprint(self) -> str:
        """A digest of all lines and of how they are cut."""
        digest = hashlib.sha256(f"{SHORTEST} {LONGEST} {self.drop}".encode())
        for file in self.places:
            digest.update("\n".join((file.path, *file.lines)).encode())
        return digest.hexdigest()


class Embedding(nn.Module):
    """Vectors of a piece, of it with the one before (by hash), of its n-grams (their mean), and of its position."""

    def __init__(self, vocabulary: int, width: int, longest: int) -> None:
        super().__init__()
        self.piece = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.pair = nn.Embedding(GRAM_ROWS, width)
        self.gram = nn.Embedding(GRAM_ROWS, width, padding_idx=PADDING)
        self.position = nn.Embedding(longest, width)

    def forward(self, pieces_BT: Tensor, grams_BTG: Tensor) -> Tensor:
        pairs_BT = pieces_BT * 7919 + F.pad(pieces_BT, (1, 0))[:, :-1]
        num_grams_BT1 = (grams_BTG != PADDING).sum(2, keepdim=True)
        return (
            self.piece(pieces_BT)
            + self.pair(pairs_BT % GRAM_ROWS)
            + self.gram(grams_BTG).sum(2) / num_grams_BT1.clamp(min=1)
            + self.position.weight[: pieces_BT.shape[1]]
        )


class Attention(nn.Module):
    """Self-attention of every piece to every real one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, real_BT: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=2))
        mixed_BHTD = F.scaled_dot_product_attention(q, k, v, attn_mask=real_BT[:, None, None, :])
        return self.out(mixed_BHTD.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor, real_BT: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), real_BT)
        return x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))


class Classifier(nn.Module):
    """Logits [B, C] from the mean and the maximum over the real pieces; those past `longest` are not read."""

    def __init__(self, vocabulary: int, classes: int, width: int, depth: int, heads: int, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.embed = Embedding(vocabulary, width, longest)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(2 * width, classes)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, pieces: Tensor, grams: Tensor, attention_mask: Tensor) -> Tensor:
        grams_BTG = grams.unflatten(1, (-1, NUM_GRAMS))[:, : self.longest]
        real_BT = attention_mask[:, : self.longest].bool()
        x_BTD = self.embed(pieces[:, : self.longest], grams_BTG)
        for block in self.blocks:
            x_BTD = block(x_BTD, real_BT)
        x_BTD, real_BT1 = self.norm(x_BTD), real_BT[:, :, None]
        mean_BD = (x_BTD * real_BT1).sum(1) / real_BT1.sum(1)
        most_BD = x_BTD.masked_fill(~real_BT1, float("-inf")).amax(1)
        return self.head(torch.cat([mean_BD, most_BD], dim=1))


def tfidf_accuracy(train: Sequence[File], valid: Sequence[File]) -> float:
    """The share of the validation snippets that a logistic regression on character n-grams names rightly.

    Each file weighs as in `Crops`, and the penalty is the best of a few for these snippets: no easy opponent.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    seen, asked = ([(text, file) for file in side for text in cut(file)] for side in (train, valid))
    vectorizer = TfidfVectorizer(
        analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, min_df=2, max_features=50_000, dtype=np.float32
    )
    weights = np.array([len(file.lines) ** -0.5 for _, file in seen])
    model = LogisticRegression(C=10.0, max_iter=100)
    model.fit(
        vectorizer.fit_transform([text for text, _ in seen]),
        [file.label for _, file in seen],
        sample_weight=weights / weights.mean(),
    )
    return float(model.score(vectorizer.transform([text for text, _ in asked]), [file.label for _, file in asked]))


def job(
    root: Path | None = None,
    width: int = 96,
    depth: int = 1,
    heads: int = 4,
    longest: int = 160,
    drop: float = 0.5,
    decay: float = 3.0,
    lr: float = 2e-3,
) -> tm.Job:
    """Names the package that a snippet comes from. root: a folder of packages, in place of the standard library."""
    names, files = read_packages(root or Path(sysconfig.get_paths()["stdlib"]))
    train, valid = split_by_file(files, valid=0.25)
    tokenizer = Tokenizer(train)
    return tm.Job(
        model=lambda: Classifier(tokenizer.size, len(names), width, depth, heads, longest),
        data=Crops(train, tokenizer, drop),
        valid=[tokenizer(text) | {"label": torch.tensor(file.label)} for file in valid for text in cut(file)],
        collate=tm.data.pad({"pieces": PADDING, "grams": PADDING}, attention_mask_of="pieces"),
        inputs=("pieces", "grams", "attention_mask"),
        loss=tm.losses.cross_entropy(label_smoothing=0.1),
        metrics={"accuracy": tm.losses.accuracy()},
        # Rows of the tables that few snippets use shrink between their uses: what is rare must not be learnt by heart.
        optimizer=tm.optim.adamw(
            lr=lr, betas=(0.9, 0.95), weight_decay=0.1, at_batch=64, groups={"embed.*": {"weight_decay": decay}}
        ),
        clip=1.0,
        schedule=tm.optim.cosine(warmup=0.1),
        global_batch=64,
        steps=1000,
        baselines={"TF-IDF logistic regression": lambda: {"accuracy": tfidf_accuracy(train, valid)}},
        blocks="blocks.*",
    )
