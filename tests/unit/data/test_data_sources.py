import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimaran.data import fingerprint, python_source, token_file
from trimaran.errors import DataError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Forty files, one of them twice, an empty one, and packages that are not part of a library."""
    for number in range(40):
        (tmp_path / f"m{number:02d}.py").write_bytes(bytes([number]) * (20 + number))
    for name in ("copy/m07.py", "empty.py", "site-packages/other.py", "__pycache__/m.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"" if name == "empty.py" else bytes([99]) * 50)
    (tmp_path / "copy/m07.py").write_bytes((tmp_path / "m07.py").read_bytes())
    return tmp_path


def test_python_source_is_the_bytes_of_the_files_in_order(library: Path) -> None:
    source = python_source(seq_len=16, root=library)
    numbers = [7, *(number for number in range(40) if number != 7)]
    assert source.tokens.tobytes() == b"".join(bytes([number]) * (20 + number) for number in numbers)
    assert source.tokens.dtype == np.uint8
    assert len(source) == len(source.tokens) // 16
    sample = source[3]
    assert sample.keys() == {"input_ids"}
    assert sample["input_ids"].dtype == torch.int64
    assert sample["input_ids"].tolist() == source.tokens[48:64].tolist()
    with pytest.raises(IndexError):
        source[len(source)]


def test_split_holds_out_whole_files(library: Path) -> None:
    source = python_source(seq_len=16, root=library)
    train, valid = source.split(valid=0.25)
    seen, unseen = set(train.tokens.tolist()), set(valid.tokens.tolist())
    assert not seen & unseen
    assert len(train.tokens) + len(valid.tokens) == len(source.tokens)
    assert abs(len(valid.tokens) - 0.25 * len(source.tokens)) < 60
    # Not the first or the last files: their names' hashes decide.
    assert unseen != set(range(len(unseen)))
    assert np.array_equal(valid.tokens, python_source(seq_len=8, root=library).split(valid=0.25)[1].tokens)


def test_fingerprints_tell_text_and_length_of_samples(library: Path) -> None:
    source = python_source(seq_len=16, root=library)
    assert source.fingerprint() == fingerprint(python_source(seq_len=16, root=library))
    assert source.fingerprint() != python_source(seq_len=15, root=library).fingerprint()
    (library / "m39.py").write_bytes(bytes([39]) * 58 + b"!")
    assert source.fingerprint() != python_source(seq_len=16, root=library).fingerprint()


def test_a_folder_without_source_is_an_error(tmp_path: Path, library: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="no Python source under"):
        python_source(root=tmp_path / "nothing")
    source = python_source(seq_len=100, root=library)
    for valid, message in ((0.001, "of 1 Python files has"), (0.0, "valid=0.0"), (1.0, "valid=1.0")):
        with pytest.raises(DataError, match=message):
            source.split(valid=valid)
    with pytest.raises(DataError, match="seq_len=0"):
        python_source(seq_len=0, root=library)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    np.arange(60_000, 60_105, dtype=np.uint16).tofile(path)
    return path


def test_token_file_maps_windows(tokens: Path) -> None:
    source = token_file(tokens, seq_len=10)
    assert len(source) == 10
    assert source[9]["input_ids"].tolist() == list(range(60_090, 60_100))
    assert isinstance(source.tokens, np.memmap)
    train, valid = source.split(valid=0.2)
    assert (len(train), len(valid)) == (8, 2)
    assert valid[0]["input_ids"].tolist() == list(range(60_080, 60_090))
    assert len({part.fingerprint() for part in (source, train, valid)}) == 3


def test_token_file_travels_as_its_path(tokens: Path) -> None:
    source = token_file(tokens, seq_len=10).split(valid=0.5)[1]
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint() == source.fingerprint()
    assert copy[0]["input_ids"].tolist() == source[0]["input_ids"].tolist()
    assert isinstance(copy.tokens, np.memmap)


def test_large_files_are_fingerprinted_in_blocks(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimaran.data.sources._DIGEST_BLOCK_BYTES", 8)
    monkeypatch.setattr("trimaran.data.sources._MAX_DIGEST_BLOCKS", 4)
    before = token_file(tokens, seq_len=10).fingerprint()
    with tokens.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert token_file(tokens, seq_len=10).fingerprint() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 106}, "has 105 tokens, fewer than seq_len=106"),
        ({"seq_len": 10, "dtype": "uint32"}, "has 210 bytes, no multiple of 4"),
        ({"seq_len": 10, "dtype": "float16"}, "dtype='float16' is no integer type"),
        ({"seq_len": 10, "dtype": "words"}, "dtype='words' is no integer type"),
    ],
)
def test_a_token_file_that_does_not_fit_is_an_error(tokens: Path, arguments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        token_file(tokens, **arguments)


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file"):
        token_file(tmp_path / "absent.bin", seq_len=1)
    np.save(tmp_path / "a.npy", np.zeros(10, np.uint16))
    with pytest.raises(DataError, match=r"is a \.npy file"):
        token_file(tmp_path / "a.npy", seq_len=1)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(DataError, match="is empty"):
        token_file(tmp_path / "empty.bin", seq_len=1)


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {"row": self.rows[index], "noise": random.random()}


def test_any_source_has_a_fingerprint() -> None:
    rows: list[Any] = [torch.ones(2), np.zeros(3), "text", 4, [1.5, (None,)], torch.tensor(True), torch.zeros(0)]
    assert fingerprint(Rows(rows)) == fingerprint(Rows(rows))
    state = random.getstate()
    changed = [[torch.ones(2), *rows[1:-1]], [torch.zeros(2), *rows[1:]], [*rows[:3], 5, *rows[4:]]]
    assert len({fingerprint(Rows(other)) for other in [rows, *changed]}) == 4
    assert random.getstate() == state


def test_hugging_face_fingerprints_are_taken() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    assert fingerprint(rows) == fingerprint(datasets.Dataset.from_dict({"x": [1, 2, 3]}))
    assert fingerprint(rows) != fingerprint(datasets.Dataset.from_dict({"x": [1, 2, 4]}))


def test_a_fingerprint_names_the_sample_that_fails() -> None:
    class Faulty(Rows):
        def __getitem__(self, index: int) -> Any:
            raise OSError("gone")

    with pytest.raises(DataError, match="Sample 0 of the data raised OSError: gone"):
        fingerprint(Faulty([1, 2]))
