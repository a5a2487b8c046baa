"""The programs in docs/run-*.md, as they stand there, on a bundle of SmolLM2: each must run and write the same first words.

After "Paris." and a new line two continuations lie so close that runtimes which round activations to 8 bits part there on some
CPUs (llama.cpp with AVX-512 VNNI does); tests/export/test_interop.py compares tokens and allows for that by their margins.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from deepthin.cli.main import main
from tests.support.chromium import Chromium, PageServer, node_modules
from tests.support.runtimes import Runtimes

pytestmark = [pytest.mark.interop, pytest.mark.slow]
_DOCS = Path(__file__).parents[2] / "docs"
_PROMPT = "The capital of France is"
_TELL = b"""<script>
  const tell = (text) => fetch("/answer", { method: "POST", body: text });
  addEventListener("error", (event) => tell(`error: ${event.message}`));
  addEventListener("unhandledrejection", (event) => tell(`error: ${event.reason}`));
  new MutationObserver(() => tell(document.body.textContent)).observe(document.body, { childList: true });
</script>"""  # posts what the page shows once it changes


def program(page: str, heading: str, language: str) -> str:
    """The fenced block of ``language`` under ``heading``."""
    text = (_DOCS / page).read_text(encoding="utf-8")
    section = text[text.index(f"\n## {heading}") + 1 :]
    section = section.split("\n## ")[0]
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A folder that holds ``bundle``, as the pages assume."""
    folder = tmp_path_factory.mktemp("pages")
    assert main(["export", str(smollm2_path), "--out", str(folder / "bundle"), "--quant", "q8_0", "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def text(place: Path, runtimes: Runtimes) -> str:
    """What the program for llama.cpp writes, which all others are held against as far as :func:`first_words` go."""
    assert runtimes["llama.cpp"].peer == "llama.cpp"
    said = run([sys.executable, "-c", program("run-laptop.md", "llama.cpp", "python")], place)
    assert first_words(said) == "Paris."
    return said


def run(command: list[str], place: Path) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def first_words(said: str) -> str:
    """Up to the first new line after the prompt."""
    return said.removeprefix(_PROMPT).strip().split("\n")[0]


@pytest.mark.parametrize(
    ("heading", "runtime"),
    [
        ("onnxruntime-genai", "genai"),
        ("onnxruntime alone", "onnxruntime"),
        ("transformers", "transformers"),
    ],
)
def test_programs_for_a_laptop(heading: str, runtime: str, place: Path, text: str, runtimes: Runtimes) -> None:
    assert runtimes[runtime].peer == runtime
    assert first_words(run([sys.executable, "-c", program("run-laptop.md", heading, "python")], place)) == first_words(text)


def test_program_for_node(place: Path, text: str, runtimes: Runtimes) -> None:
    assert runtimes["transformers.js"].peer == "transformers.js"
    node = shutil.which("node")
    assert node is not None
    (place / "node_modules").symlink_to(node_modules())
    (place / "run.mjs").write_text(program("run-browser.md", "In Node", "js"), encoding="utf-8")
    assert first_words(run([node, "run.mjs"], place)) == first_words(text)


def test_page_for_a_browser(place: Path, text: str, runtimes: Runtimes) -> None:
    assert runtimes["chromium"].peer == "chromium"
    page = program("run-browser.md", "In a browser", "html").encode() + _TELL
    with (
        closing(PageServer(page, {"node_modules": node_modules(), "bundle": place / "bundle"})) as server,
        closing(Chromium(server.url)),
    ):
        said = server.said.get(timeout=180).decode()
        missing = [path for path in server.failed if "favicon" not in path]
    assert first_words(said) == first_words(text), missing
