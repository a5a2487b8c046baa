"""What is shipped: linked folders, a wheel that equals the tree, metadata that is ours, and a README whose commands exist."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from deepthin.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "search", "export", "profiles", "cli")
DATA_SUFFIXES = {".py", ".toml", ".txt", ".mjs", ".typed"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_link_is_the_folder_at_the_root(folder: str) -> None:
    link = ROOT / "src" / "deepthin" / folder
    assert link.is_dir(), f"{link} is no directory: was this checked out without symbolic links?"
    assert link.resolve() == (ROOT / folder).resolve()
    assert (link / "__init__.py").is_file()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packaging reads, so that no earlier build leaves traces in a new one."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc", "*.nbi", "*.nbc")
    for name in (*FOLDERS, "src"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel built from the sdist of ``tree``."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tree / "dist").glob("*.whl")
    assert len(list((tree / "dist").glob("*.tar.gz"))) == 1
    with zipfile.ZipFile(path) as opened:
        yield opened


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (name,) = [item for item in wheel.namelist() if item.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_exactly_the_files_of_the_tree(tree: Path, wheel: zipfile.ZipFile) -> None:
    expected = {f"deepthin/{path.name}" for path in (tree / "src" / "deepthin").iterdir() if path.suffix in DATA_SUFFIXES}
    for folder in FOLDERS:
        files = (path for path in (tree / folder).rglob("*") if path.suffix in DATA_SUFFIXES)
        expected |= {f"deepthin/{path.relative_to(tree).as_posix()}" for path in files}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_metadata_is_ours(wheel: zipfile.ZipFile) -> None:
    metadata = metadata_of(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Name"] == "deepthin"
    assert metadata["Summary"] == project["description"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "deepthin = deepthin.cli.main:main" in wheel.read(entry_points).decode()


def test_every_requirement_says_why_it_is_needed() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index("dependencies = [")
    requirements = [line for line in lines[start + 1 : lines.index("]", start)] if line.strip()]
    assert requirements
    for line in requirements:
        assert re.search(r'",\s+# \S+', line), f"no reason beside {line.strip()}"


@pytest.mark.parametrize(
    "name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "src/README.md"]
)
def test_documents_are_there_and_their_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    assert len(text) > 200
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}, which is not there"


def shell_commands(text: str) -> list[str]:
    """Lines of the ``sh`` blocks of a Markdown text, continuation lines joined, comments left out."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.split(" #")[0].strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_every_deepthin_command_in_the_documents_has_the_options_it_uses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    used = [
        part.split()
        for line in shell_commands((ROOT / name).read_text())
        for part in re.split(r"&&|\|", line)
        if re.match(r"\s*(\S*/)?deepthin\b", part)
    ]
    if name == "README.md":
        assert {words[1] for words in used} >= {"search", "inspect", "generate", "export", "verify", "bench"}
    for words in used:
        assert words[1] in COMMANDS
        assert main([words[1], "--help"]) == 0
        text = capsys.readouterr().out
        for option in (word for word in words if re.fullmatch(r"-p|-n|--[a-z-]+", word)):
            assert re.search(rf"(^|[\s\[]){re.escape(option)}\b", text), f"{name}: {option} is no option of {words[1]}"


def test_the_python_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.split()[0] == "134515008"


def test_the_test_command_of_the_readme_is_the_one_ci_runs() -> None:
    commands = shell_commands((ROOT / "README.md").read_text())
    (tests,) = [line for line in commands if "pytest" in line]
    run = tests.split("&&")[-1].strip()
    assert "./check" in (ROOT / ".ci" / "run").read_text()
    assert run.removeprefix(".venv/bin/") in (ROOT / "check").read_text()


def test_scripts_are_executable() -> None:
    for name in ("check", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o100
