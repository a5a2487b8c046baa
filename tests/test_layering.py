"""Rules that no type checker sees: one door per heavy package, light imports, kernels compiled in one place."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepthin.cli.main import EXIT_CODES
from deepthin.engine import errors

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "search", "export", "profiles", "cli")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
DOORS = {  # heavy package -> where it may be imported, as path prefixes
    "numba": ("engine/jit.py", "engine/simd/"),
    "llvmlite": ("engine/jit.py", "engine/simd/", "engine/cpu.py"),
    "onnx": ("export/onnx_",),
    "onnxruntime": ("export/peer_onnxruntime.py", "profiles/peer_ort_bench.py"),
    "onnxruntime_genai": ("export/peer_genai.py", "profiles/peer_genai_bench.py"),
    "llama_cpp": ("export/peer_llama_cpp.py", "profiles/peer_llama_bench.py"),
    "optuna": ("search/study.py",),
    "tokenizers": ("engine/tokenizer.py",),
}
NEVER = ("torch", "transformers", "pickle", "requests", "urllib", "http", "socket", "pydantic", "safetensors", "gguf")


def imported(path: Path) -> set[str]:
    """Full names of everything ``path`` imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_heavy_packages_come_in_by_their_door_and_some_never(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    roots = {module.partition(".")[0] for module in imported(path)}
    for package, doors in DOORS.items():
        if package in roots:
            assert name.startswith(doors), f"{name} imports {package}, whose doors are {doors}"
    assert not roots & set(NEVER)
    assert not roots & set(FOLDERS), f"{name}: import deepthin.<folder>, or classes load twice"


def test_every_door_is_used() -> None:
    for package, doors in DOORS.items():
        users = [path for path in SOURCES if package in {module.partition(".")[0] for module in imported(path)}]
        assert {path for path in users if path.relative_to(ROOT).as_posix().startswith(doors)}, f"nothing imports {package}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return {module.partition(".")[0] for module in done.stdout.split()}


@pytest.mark.parametrize(
    "statement",
    [
        "import deepthin",
        "import deepthin.cli.main",
        "import deepthin.engine.load, deepthin.engine.accounting, deepthin.engine.reference",
        "import deepthin.export.feasibility, deepthin.export.manifest",
        "import deepthin.profiles.schema, deepthin.profiles.machine",
        "import deepthin.search.config",
    ],
)
def test_light_modules_load_nothing_heavy(statement: str) -> None:
    assert not loaded_by(statement) & set(DOORS)


def test_import_deepthin_loads_no_numpy() -> None:
    assert "numpy" not in loaded_by("import deepthin")


def test_generating_loads_no_exporter_and_no_searcher() -> None:
    command = ["generate", "L=1,d=64,heads=1,ff=64,vocab=64", "--ids", "1,2", "-n", "2", "--quiet"]
    loaded = loaded_by(f"from deepthin.cli.main import main; assert main({command}) == 0; print()")
    assert {"numpy", "numba"} <= loaded
    assert not loaded & {"onnx", "onnxruntime", "optuna", "llama_cpp", "tokenizers", "sqlite3", "concurrent"}


def test_numba_compiles_in_one_place() -> None:
    for path in SOURCES:
        if path.name != "jit.py":
            assert not re.search(r"\bn?jit\(|fastmath\s*=|@n?jit\b|@numba", path.read_text()), path


def test_exit_codes_are_documented() -> None:
    family = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.DeepthinError)]
    codes = {item.exit_code for item in family} | {0, 130}
    documented = {int(code) for code in re.findall(r"^  (\d+)  \S", EXIT_CODES, re.MULTILINE)}
    assert documented == codes
    readme = (ROOT / "README.md").read_text()
    for code in codes - {130}:
        assert f"`{code}`" in readme


def test_no_source_file_grows_past_500_lines() -> None:
    long = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in long.items() if lines > 500} == {}


def test_files_are_named_after_what_they_define() -> None:
    assert not [path for path in SOURCES if path.stem in ("utils", "helpers", "common", "misc")]
