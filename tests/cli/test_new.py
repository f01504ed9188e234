"""`trimaran new`: a recipe as a job file, from a checkout and from an installed wheel; nothing is overwritten."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trimaran.cli.main import main
from trimaran.cli.new import find_recipes, missing_packages

ROOT = Path(__file__).parents[2]
RUN_AND_TELL = """
import sys
from trimaran.cli.main import main
code = main(sys.argv[1:])
print("torch is loaded" if "torch" in sys.modules else "torch is not loaded", file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_every_job_of_the_repository_can_be_asked_for() -> None:
    jobs = [path for path in (ROOT / "recipes").glob("*.py") if "\ndef job(" in path.read_text()]
    assert find_recipes().keys() == {path.stem.replace("_", "-") for path in jobs}
    assert find_recipes().keys() >= {"gpt", "resnet", "text-classifier", "finetune-vision", "hf"}


@pytest.mark.parametrize("name", find_recipes())
def test_it_writes_the_recipe_and_says_what_to_run(name: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", name]) == 0
    file = f"{name.replace('-', '_')}.py"
    source = (ROOT / "recipes" / file).read_text()
    assert Path(file).read_text() == source.replace("recipes/", "")
    told = capsys.readouterr().out
    assert f"wrote    {file}: {(ast.get_docstring(ast.parse(source)) or '').splitlines()[0]}" in told
    assert f"trimaran train {file} --procs 2" in told
    assert "needs" not in told


def test_what_it_writes_can_be_imported_by_itself(empty: Path) -> None:
    for name in find_recipes():
        assert main(["new", name, "--into", f"own_{name.replace('-', '_')}.py"]) == 0
    written = [path.stem for path in empty.glob("own_*.py")]
    check = f"import {', '.join(written)}, sys\nassert not [path for path in sys.path if 'recipes' in path]"
    ran = subprocess.run([sys.executable, "-c", check], cwd=empty, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_files_beside_a_recipe_come_along(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "finetune-vision"]) == 0
    assert {path.name for path in empty.iterdir()} == {"finetune_vision.py", "resnet.py", "image_folder.py"}
    Path("finetune_vision.py").unlink()
    assert main(["new", "finetune-vision"]) == 0  # what is there already, and the same, stays
    Path("finetune_vision.py").unlink()
    Path("resnet.py").write_text("mine")
    assert main(["new", "finetune-vision"]) == 2
    assert "resnet.py exists, and is another." in capsys.readouterr().err
    assert not Path("finetune_vision.py").exists()
    assert Path("resnet.py").read_text() == "mine"


def test_it_writes_where_it_is_told(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty / "jobs").mkdir()
    assert main(["new", "gpt", "--into", "jobs/mine.py"]) == 0
    text = Path("jobs/mine.py").read_text()
    assert "trimaran train jobs/mine.py --procs 2" in text
    assert "recipes/" not in text
    assert "trimaran train jobs/mine.py" in capsys.readouterr().out


def test_nothing_is_overwritten(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("gpt.py").write_text("mine")
    assert main(["new", "gpt"]) == 2
    told = capsys.readouterr().err
    assert "gpt.py exists." in told
    assert "--into" in told
    assert Path("gpt.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["new", "gtp"], "Did you mean 'gpt'?"),
        (["new", "text_classifier"], "Did you mean 'text-classifier'?"),
        (["new", "text_classifier.py"], "Did you mean 'text-classifier'?"),
        (["new", "zzz"], "trimaran new alone lists them"),
        (["new", "gpt", "--in-to", "a.py"], "Did you mean --into?"),
        (["new", "gpt", "hf"], "'hf' was given to trimaran new"),
        (["new", "gpt", "--into", "no/such/folder.py"], "cannot be written: No such file or directory"),
        (["nwe", "gpt"], "Did you mean 'new'?"),
    ],
)
def test_what_cannot_be_meant(words: list[str], expected: str, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert expected in capsys.readouterr().err
    assert list(empty.iterdir()) == []


def test_alone_it_lists_the_recipes(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == list(find_recipes())
    assert all(len(line.split()) > 6 for line in lines)


def test_packages_that_are_not_installed_are_told() -> None:
    first = "import os\nimport torch.nn\nfrom beside import b"
    second = "def job():\n    from not_installed_here.deep import thing\n    import nor_this as x"
    assert missing_packages([first, second], besides={"beside"}) == ["nor_this", "not_installed_here"]


def run(words: list[str], folder: Path, package: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", RUN_AND_TELL, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_it_loads_no_torch(empty: Path) -> None:
    for words in (["new"], ["new", "--help"], ["new", "hf"]):
        ran = run(words, empty, ROOT / "src")
        assert ran.returncode == 0, ran.stderr
        if "--help" not in words:
            assert "torch is not loaded" in ran.stderr


def test_an_installed_wheel_has_the_recipes(tmp_path: Path, empty: Path) -> None:
    checkout, wheels, installed = (tmp_path / name for name in ("checkout", "wheels", "installed"))
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("src", "recipes"):
        without = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=without)
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=checkout, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)  # what installing a pure wheel does
    names = {path.name for path in (ROOT / "recipes").glob("*.py")}
    assert {path.name for path in (installed / "trimaran" / "recipes").iterdir()} == names
    ran = run(["new", "gpt"], empty, installed)
    assert ran.returncode == 0, ran.stderr
    assert (empty / "gpt.py").read_text() == (ROOT / "recipes" / "gpt.py").read_text().replace("recipes/", "")
    where = subprocess.run(
        [sys.executable, "-c", "import trimaran; print(trimaran.__file__)"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(installed))
