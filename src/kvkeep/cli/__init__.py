"""The ``kvkeep`` command. Each subcommand is a module that is imported when it runs, and not before."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from kvkeep._version import __version__
from kvkeep.errors import KvkeepError, StoreError

COMMANDS = {
    "demo": "kvkeep.cli.demo",
    "init": "kvkeep.cli.init",
    "warm": "kvkeep.cli.warm",
    "ls": "kvkeep.cli.ls",
    "inspect": "kvkeep.cli.inspect",
    "verify": "kvkeep.cli.verify",
    "gc": "kvkeep.cli.gc",
    "rm": "kvkeep.cli.rm",
    "stats": "kvkeep.cli.stats",
    "explain": "kvkeep.cli.explain",
    "push": "kvkeep.cli.push",
    "bench": "kvkeep.cli.bench",
}
"""The subcommands in the order of ``--help``, with the modules whose ``command`` they are."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells give it: 128 and the number of the signal."""


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is asked for, and turns every error of ours into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the subcommands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name]).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except KvkeepError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has seen enough: click ends quietly
                raise
            fail(_describe(error), StoreError.exit_code)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl(_EXIT_CODES)


def fail(message: str, exit_code: int) -> NoReturn:
    """Say what went wrong in one line on stderr, and end the command."""
    click.echo(f"kvkeep: {' '.join(message.split())}", err=True)
    raise click.exceptions.Exit(exit_code) from None


_EXIT_CODES: Iterable[tuple[str, str]] = [
    ("0", "done"),
    ("1", "the demo missed its mark, or you answered no"),
    ("2", "the request itself is wrong"),
    ("3", "a cache that kvkeep cannot keep"),
    ("4", "the store's directory cannot be used, or its limits cannot be kept"),
    ("5", "an entry is damaged, or there is no such entry"),
    ("6", "a package is not installed"),
    ("130", "ended with Ctrl-C"),
]


def _describe(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="Directory of the store; otherwise $KVKEEP_STORE, otherwise a folder in your cache directory.",
)
@click.version_option(__version__, prog_name="kvkeep")
@click.pass_context
def main(ctx: click.Context, store: Path | None) -> None:
    """Keep the prefilled KV caches of Hugging Face models on disk, so that a prefix is prefilled once, ever."""
    ctx.obj = store
