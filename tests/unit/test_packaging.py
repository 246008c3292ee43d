"""What is installed: the packages listed are the ones there are, and none of them is called `tools`."""

from __future__ import annotations

import configparser
import subprocess
import sys
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
    loose = (setup_cfg["options"]["install_requires"] + setup_cfg["options.extras_require"]["s3"]).split("\n")
    names = {line.split(">=")[0].strip().lower() for line in loose if line.strip()}
    assert names <= exact


def test_gba_hvd_is_the_only_command(setup_cfg: configparser.ConfigParser) -> None:
    assert setup_cfg["options.entry_points"]["console_scripts"].strip() == "gba-hvd = gba_hvd_tools.cli:main"


def test_the_command_line_does_not_import_torch() -> None:
    """Subcommands import what is slow when they run, so that `--help` answers at once."""
    code = "import sys; from gba_hvd_tools.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert said.stdout == "False\n"
