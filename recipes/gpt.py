"""A GPT on the source of the interpreter's own standard library, byte by byte.

    trimaran train recipes/gpt.py --procs 2

Minutes on two CPU cores. It ends with the validation loss (nats per byte, on files unseen in training), that of a
trigram table on the same predictions, and a page of Python it wrote. Shapes: B samples, T bytes, D width, H heads.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trimaran as tm

PRIME = 2**31 - 1  # of the hash in Embedding


class Embedding(nn.Module):
    """A byte's vector, plus one each for the last two, three and four bytes.

    Local spelling then costs a look-up, and the blocks are left with what lies further back. The strings share the
    rows of small tables by a polynomial hash.
    """

    def __init__(self, width: int, rows: int = 8192) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.strings = nn.ModuleList(nn.Embedding(rows, width) for _ in range(3))

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD, hash_BT = self.byte(ids_BT), ids_BT
        for back, table in enumerate(self.strings, start=1):
            earlier_BT = F.pad(ids_BT, (back, 0))[:, :-back]
            hash_BT = (hash_BT + pow(1_000_003, back, PRIME) * earlier_BT) % PRIME
            x_BTD = x_BTD + table(hash_BT % table.num_embeddings)
        return x_BTD


class Attention(nn.Module):
    """Causal self-attention over rotary positions (Su et al. 2021)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, seq_len: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        rates = 10_000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(seq_len)[:, None] * torch.cat([rates, rates])
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        q, k, v = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))

    def rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        return x * self.cos[:length] + torch.cat([-second, first], dim=-1) * self.sin[:length]


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, seq_len: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width, bias=False)
        self.attn = Attention(width, heads, seq_len)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, seq_len: int) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.embed = Embedding(width)
        self.blocks = nn.ModuleList(Block(width, heads, seq_len) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)
        for name, weight in self.named_parameters():
            if name.startswith(("embed", "head")):
                nn.init.normal_(weight, std=0.02)
            elif weight.ndim == 2:
                # The ends of the residual branches start smaller, so that depth does not raise the variance.
                ends_branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.5 / (weight.shape[1] * (2 * depth if ends_branch else 1)) ** 0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BTD = self.embed(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


@torch.no_grad()
def write_python(model: nn.Module, prompt: str = "def ", length: int = 400, temperature: float = 0.6) -> str:
    """`prompt` and `length` more bytes, each drawn from the model's prediction."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([ids[-model.seq_len :]], device=device))[0, -1].float().cpu()
        ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return bytes(ids).decode(errors="replace")


def trigram_nats(train: np.ndarray, windows: np.ndarray, strength: float = 50.0) -> float:
    """What a table of the training bytes loses on each prediction [N, T - 1] the model is judged by, in nats.

    Those are bytes 1 to T - 1 of each window, from the bytes before it in the window: the last two, and at byte 1
    the only one. Counts are smoothed with `strength` imagined ones spread as the shorter context predicts (MacKay and
    Peto 1995); 50 is the best on these files.
    """
    tokens, target = train.astype(np.int64), windows[:, 1:]

    def smooth(order: int, context: np.ndarray, target: np.ndarray, prior: np.ndarray) -> np.ndarray:
        codes = sum(tokens[i : len(tokens) - order + 1 + i] * 256 ** (order - 1 - i) for i in range(order))
        counts = np.bincount(codes, minlength=256**order).reshape(-1, 256)
        return (counts[context, target] + strength * prior) / (counts.sum(axis=1)[context] + strength)

    single = smooth(1, np.zeros_like(target), target, np.full(target.shape, 1 / 256))
    pair = smooth(2, windows[:, :-1], target, single)
    triple = smooth(3, 256 * windows[:, :-2] + windows[:, 1:-1], windows[:, 2:], pair[:, 1:])
    return -np.log(np.concatenate([pair[:, :1], triple], axis=1))


def job(width: int = 128, depth: int = 2, heads: int = 4, seq_len: int = 128, lr: float = 2e-3) -> tm.Job:
    """A GPT on the standard library's own source, byte by byte."""
    train, valid = tm.data.python_source(seq_len=seq_len).split(valid=0.01)

    def trigram_table() -> dict[str, float]:
        windows = np.stack([sample["input_ids"].numpy() for sample in valid])
        return {"loss": float(trigram_nats(train.tokens, windows).mean())}

    # A table's row is met rarely: it learns faster, and does not decay while it waits.
    tables = {"embed.*": {"lr_scale": 4.0, "weight_decay": 0.0}}
    return tm.Job(
        model=lambda: GPT(width, depth, heads, seq_len),
        data=train,
        valid=valid,
        inputs=("input_ids",),
        loss=tm.losses.next_token(),
        metrics={"accuracy": tm.losses.token_accuracy()},
        optimizer=tm.optim.adamw(lr=lr, betas=(0.9, 0.95), weight_decay=0.1, groups=tables, at_batch=16),
        clip=1.0,
        schedule=tm.optim.cosine(warmup=0.05, final=0.0),
        global_batch=16,
        steps=2400,
        sample=write_python,
        baselines={"trigram table": trigram_table},
        blocks="blocks.*",
        chain=["embed", "blocks.*", "norm", "head"],
        tp_plan={
            "blocks.*.attn.qkv": tm.colwise(heads=heads, parts=3),
            "blocks.*.attn.out": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "blocks.*.*_norm": "sequence",
            "norm": "sequence",
            "embed.strings.*": "vocab",
            "head": "vocab",
        },
    )
