"""The text classifier: files on one side only, snippets within their files, padding that changes nothing, parity."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import trimaran as tm
from pool import Pool
from trimaran.data import BatchLoader, Order, build_loader
from trimaran.engine import Engine, build_engine, try_micro_batch
from trimaran.layout import Layout
from trimaran.world.groups import join_default_group, open_world

RECIPE = Path(__file__).parents[3] / "recipes" / "text_classifier.py"
spec = importlib.util.spec_from_file_location("text_classifier_recipe", RECIPE)
assert spec is not None
assert spec.loader is not None
text = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = text  # dataclasses look their module up
spec.loader.exec_module(text)

WORDS = {"boats": ["hull", "keel", "mast"], "fruit": ["apple", "pear", "plum"], "tools": ["saw", "file", "drill"]}


def write_packages(root: Path, num_files: int = 8) -> Path:
    """Packages whose files speak of different things."""
    for package, words in WORDS.items():
        (root / package / "tests").mkdir(parents=True)
        for number in range(num_files):
            draw = random.Random(f"{package} {number}")
            lines = [
                f"{draw.choice(words)}_{draw.choice(words)} = get{draw.choice(words).title()}()" for _ in range(40)
            ]
            (root / package / f"part{number}.py").write_text("\n\n".join([*lines, f"only_in_{package}{number}"]))
        (root / package / "tests" / "test_it.py").write_text("tested = 1\n" * 40)
        (root / package / "__init__.py").write_text("short = 1\n")
    (root / "few").mkdir()
    (root / "few" / "one.py").write_text("alone = 1\n" * 40)
    (root / "module.py").write_text("module = 1\n" * 40)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_packages(tmp_path / "lib")


def sample_batch(*lengths: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    pad = tm.data.pad({"pieces": 0, "grams": 0}, attention_mask_of="pieces")
    return pad(
        [
            {
                "pieces": torch.randint(1, 30, (length,), generator=draw),
                "grams": torch.randint(0, text.GRAM_ROWS, (length * text.NUM_GRAMS,), generator=draw),
            }
            for length in lengths
        ]
    )


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return text.Classifier(vocabulary=30, classes=5, width=16, depth=2, heads=2, longest=12)


def test_packages_with_enough_files_are_classes_and_tests_are_left_out(root: Path) -> None:
    names, files = text.read_packages(root)
    assert names == list(WORDS)
    assert [sum(file.label == label for file in files) for label in range(3)] == [8, 8, 8]
    assert all(file.path.startswith(names[file.label] + "/part") for file in files)
    assert all(len(file.lines) == 41 and all(line.strip() for line in file.lines) for file in files)


def test_no_file_is_on_both_sides_and_every_class_is(root: Path) -> None:
    _, files = text.read_packages(root)
    train, valid = text.split_by_file(files, valid=0.25)
    assert sorted([*train, *valid], key=lambda file: file.path) == sorted(files, key=lambda file: file.path)
    assert not {file.path for file in train} & {file.path for file in valid}
    assert [sum(file.label == label for file in valid) for label in range(3)] == [2, 2, 2]
    again, _ = text.split_by_file(files[::-1], valid=0.25)
    assert {file.path for file in again} == {file.path for file in train}


def test_the_interpreters_library_has_classes_enough() -> None:
    job = text.job()
    classes = {int(sample["label"]) for sample in job.valid}
    assert len(classes) >= 8
    assert classes == {file.label for file in job.data.places}
    counts = [sum(int(sample["label"]) == label for sample in job.valid) for label in classes]
    assert max(counts) < 0.4 * sum(counts)


def test_snippets_of_validation_cover_each_line_once(root: Path) -> None:
    _, files = text.read_packages(root)
    for file in files:
        snippets = list(text.cut(file))
        assert "\n".join(snippets) == "\n".join(file.lines)
        assert all(text.SHORTEST <= snippet.count("\n") + 1 <= text.LONGEST for snippet in snippets[:-1])
        assert snippets == list(text.cut(file))


def test_names_are_cut_into_their_words() -> None:
    assert text.PIECE.findall("self.getHTTPError2(__x_1)") == [
        *("self", ".", "get", "HTTP", "Error", "2", "("),
        *("__", "x", "_", "1", ")"),
    ]


def test_a_piece_that_only_one_file_has_is_unknown(root: Path) -> None:
    train, _ = text.split_by_file(text.read_packages(root)[1], valid=0.25)
    tokenizer = text.Tokenizer([*train, replace(train[0], path="more", lines=("xylophone xylophone",))])
    assert "hull" in tokenizer.index
    assert "xylophone" not in tokenizer.index
    sample = tokenizer("hull xylophone")
    assert sample["pieces"].tolist() == [tokenizer.index["hull"], text.UNKNOWN]
    hull, xylophone = sample["grams"].view(2, text.NUM_GRAMS).tolist()
    assert hull[:6] == text.hash_grams("Hull")[:6]  # <hu hul ull ll> <hul hull
    assert text.PADDING not in xylophone
    assert max(hull + xylophone) < text.GRAM_ROWS
    assert tokenizer.size == max(tokenizer.index.values()) + 1


def test_dropped_pieces_leave_nothing_of_themselves(root: Path) -> None:
    tokenizer = text.Tokenizer(text.read_packages(root)[1])
    random.seed(0)
    sample = tokenizer("hull keel " * 500, drop=0.3)
    dropped = sample["pieces"] == text.UNKNOWN
    assert 0.25 < dropped.double().mean() < 0.35
    assert torch.equal(dropped, (sample["grams"].view(-1, text.NUM_GRAMS) == text.PADDING).all(1))
    assert not (tokenizer("hull keel " * 500)["pieces"] == text.UNKNOWN).any()


def test_crops_are_drawn_again_from_the_generator_and_lie_in_their_file(root: Path) -> None:
    _, files = text.read_packages(root)
    tokenizer = text.Tokenizer(files)
    crops = text.Crops(files, tokenizer, drop=0.0)
    assert len(crops) == 24 * round(41 ** (1 / 3))
    lines = [tokenizer(line)["pieces"].tolist() for line in crops.places[7].lines]
    lengths = set()
    for seed in range(60):
        random.seed(seed)
        sample = crops[7]
        random.seed(seed)
        assert torch.equal(crops[7]["pieces"], sample["pieces"])
        assert int(sample["label"]) == crops.places[7].label
        runs = [
            stop - start
            for start in range(len(lines))
            for stop in range(start + text.SHORTEST, min(len(lines), start + text.LONGEST) + 1)
            if list(chain(*lines[start:stop])) == sample["pieces"].tolist()
        ]
        assert runs
        lengths.update(runs)
    assert min(lengths) == text.SHORTEST
    assert max(lengths) == text.LONGEST


def test_the_fingerprint_follows_the_text_and_the_crops(root: Path) -> None:
    _, files = text.read_packages(root)
    tokenizer = text.Tokenizer(files)
    first = text.Crops(files, tokenizer, 0.5).fingerprint()
    assert text.Crops(files, tokenizer, 0.5).fingerprint() == first
    assert text.Crops(files, tokenizer, 0.4).fingerprint() != first
    edited = replace(files[3], lines=(*files[3].lines[:-1], "edited"))
    assert text.Crops([*files[:3], edited, *files[4:]], tokenizer, 0.5).fingerprint() != first


def test_padding_and_neighbours_change_nothing(model: torch.nn.Module) -> None:
    batch = sample_batch(5, 9, 2)
    logits = model(**batch)
    assert logits.shape == (3, 5)
    for row, length in enumerate((5, 9, 2)):
        alone = {key: each[row : row + 1] for key, each in batch.items()}
        short = {key: each[:, : length * (text.NUM_GRAMS if key == "grams" else 1)] for key, each in alone.items()}
        assert torch.allclose(model(**short)[0], logits[row], atol=1e-6)


def test_order_matters_and_what_is_past_the_longest_does_not(model: torch.nn.Module) -> None:
    batch = sample_batch(9)
    turned = {
        "pieces": batch["pieces"].flip(1),
        "grams": batch["grams"].view(1, 9, -1).flip(1).flatten(1),
        "attention_mask": batch["attention_mask"],
    }
    assert not torch.allclose(model(**turned), model(**batch), atol=1e-6)
    long = sample_batch(20)
    first = {key: each[:, : 12 * (text.NUM_GRAMS if key == "grams" else 1)] for key, each in long.items()}
    assert torch.equal(model(**long), model(**first))


def test_it_starts_at_chance_and_every_parameter_gets_a_gradient(model: torch.nn.Module) -> None:
    logits = model(**sample_batch(12, 12, 7))
    loss = F.cross_entropy(logits, torch.tensor([0, 1, 2]))
    assert loss.item() == pytest.approx(math.log(5), abs=0.1)
    loss.backward()
    assert [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()] == []


def test_the_baseline_learns_what_can_be_learnt_and_is_judged_on_held_out_snippets(root: Path) -> None:
    train, valid = text.split_by_file(text.read_packages(root)[1], valid=0.25)
    assert text.tfidf_accuracy(train, valid) == 1.0
    mislabelled = [replace(file, label=(file.label + 1) % 3) for file in valid]
    assert text.tfidf_accuracy(train, mislabelled) == 0.0


def test_it_learns(root: Path) -> None:
    torch.set_num_threads(1)
    engine, batches, valid = start(text.job(root=root, lr=1e-2), steps=30)
    for batch in batches:
        engine.step(batch)
    figures = engine.evaluate(valid)
    assert figures["accuracy"] > 0.9


def start(job: tm.Job, steps: int, precision: str = "fp32") -> tuple[Engine, BatchLoader, BatchLoader]:
    """The engine and this rank's training and validation batches, on as many ranks as there are."""
    job = job.with_overrides(steps=steps, seed=None, global_batch=16)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout.parse(f"precision={precision}").resolve(world_size=world_size, global_batch=16)
    here = torch.device("cpu")
    world = join_default_group(layout, here) if dist.is_initialized() else open_world(None, layout, device="cpu")

    def load(source: object, order: Order, total: int) -> BatchLoader:
        return build_loader(
            source,
            collate=job.collate,
            order=order,
            global_batch=16,
            total_samples=total,
            dp=layout.dp,
            dp_rank=world.place.dp,
            micro_batch=layout.micro_batch,
        )

    training = load(job.data, Order(len(job.data), job.seed), job.total_samples)
    validation = load(job.valid, Order(len(job.valid), 0, shuffle=False), len(job.valid))
    return build_engine(job, layout, world), training, validation


def losses(root: Path) -> list[float]:
    engine, batches, _ = start(text.job(root=root, lr=1e-2), steps=5)
    return [engine.step(batch).loss for batch in batches]


def test_the_curve_is_the_same_on_one_two_and_three_processes(pool: Pool, root: Path) -> None:
    alone = losses(root)
    assert alone[-1] < alone[0]
    for world_size in (2, 3):
        for curve in pool.run(losses, world_size, root):
            assert curve == pytest.approx(alone, rel=2e-6, abs=0)


def test_a_dry_micro_batch_finds_nothing_to_complain_about(root: Path) -> None:
    job = text.job(root=root)
    engine, batches, _ = start(job, steps=1)
    assert try_micro_batch(engine, next(iter(batches)).micro_batches[0], job.input_keys).unused_parameters == ()
