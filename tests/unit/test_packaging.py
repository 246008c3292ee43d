"""What is installed: the packages listed are the ones there are, and none of them is called `tools`."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_folder_with_code_is_a_listed_package(setup_cfg: configparser.ConfigParser) -> None:
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("gba_hvd", "recovery", "tools")
        for path in (ROOT / top).rglob("*.py")
    }
    packages = {folder.replace("tools", "gba_hvd_tools", 1).replace("/", ".") for folder in folders}
    assert set(setup_cfg["options"]["packages"].split()) == packages
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


def test_every_loose_bound_has_its_exact_version(setup_cfg: configparser.ConfigParser) -> None:
    exact = {
        line.split("==")[0].lower() for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line
    }
    extras = dict(setup_cfg["options.extras_require"])
    assert extras.pop("all").strip() == f"gba-hvd[{','.join(extras)}]"
    assert extras.pop("horovod") == "horovod==0.28.1"  # built by tools/build_horovod.py
    loose = "\n".join([setup_cfg["options"]["install_requires"], *extras.values()]).split("\n")
    names = {line.split(">=")[0].strip().lower() for line in loose if line.strip()}
    assert names <= exact


def test_gba_hvd_is_the_only_command(setup_cfg: configparser.ConfigParser) -> None:
    assert setup_cfg["options.entry_points"]["console_scripts"].strip() == "gba-hvd = gba_hvd_tools.cli:main"


@pytest.mark.processes
def test_the_command_line_does_not_import_torch() -> None:
    """Subcommands import what is slow when they run, so that `--help` answers at once."""
    code = "import sys; from gba_hvd_tools.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert said.stdout == "False\n"


NOT_INSTALLED = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("matplotlib", "pyarrow", "mlflow", "horovod"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
import gba_hvd, recovery
from gba_hvd_tools.cli import main
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.exit(main(sys.argv[1:]))", "data needs pyarrow, which is not installed: pip install 'gba-hvd[data]'"),
        (
            "from gba_hvd.tracking.plots import draw_plots, THROUGHPUT\n"
            "draw_plots({THROUGHPUT: []}, (), '', None); print('nothing to draw')\n"
            "from gba_hvd.tracking import plots\nplots._figure('', 1)",
            "plots need matplotlib, which is not installed: pip install 'gba-hvd[plots]'",
        ),
    ],
)  # fmt: skip
@pytest.mark.processes
def test_the_core_imports_without_what_is_optional_and_says_what_is_missing(
    tmp_path: Path, code: str, words: str
) -> None:
    command = [sys.executable, "-c", NOT_INSTALLED + code, "data", "prepare", "log.csv", "--out", "out"]
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert said.returncode == 1
    assert words in said.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.processes
def test_a_source_distribution_has_licence_docs_and_tests(tmp_path: Path) -> None:
    here = shutil.copytree(
        ROOT, tmp_path / "project", ignore=shutil.ignore_patterns(".*", "runs", "*.egg-info", "__pycache__", "build")
    )
    code = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=here, capture_output=True, text=True, check=True
    )
    with tarfile.open(tmp_path / made.stdout.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        metadata = archive.extractfile(next(n for n in archive.getnames() if n.endswith("/PKG-INFO")))
        assert metadata is not None
        assert "License: Apache-2.0" in metadata.read().decode()
    assert {
        "LICENSE", "NOTICE", "DESIGN.md", "Makefile", "constraints.txt", "docs/RECOVERY.md", "examples/minimal.py",
        "gba_hvd/py.typed", "tests/unit/test_packaging.py", "tests/processes/worker.py", "tools/cli.py",
    } <= names  # fmt: skip
    assert not [name for name in names if "__pycache__" in name]
