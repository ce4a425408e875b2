"""The command `edge-runtime`: its groups, and what becomes of errors.

Commands read options, call the part that does the work and print what came of it. Settings are resolved there and
nowhere below.
"""

import errno
import os
import re
import signal
import sys
from importlib.metadata import entry_points
from typing import NoReturn

import click

from edge_runtime.commands import changing, daemons, keys, looking, requests, serving
from edge_runtime.commands.shared import example, say
from edge_runtime.errors import EXIT_DONE, EXIT_USER, EdgeError, one_line
from kernels.settings import SettingError
from topology.errors import TopologyError

COMMANDS_GROUP = "edge_runtime.commands"
MENDED_BY_PEOPLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
)  # what a person can mend


class _Commands(click.Group):
    """Own commands, and those that other packages registered."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(
            {*super().list_commands(context), *(point.name for point in entry_points(group=COMMANDS_GROUP))}
        )

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        own = super().get_command(context, name)
        if own is not None:
            return own
        found = [point for point in entry_points(group=COMMANDS_GROUP) if point.name == name]
        return found[0].load() if found else None


@click.group(
    cls=_Commands,
    epilog=example("edge-runtime up --detach", "edge-runtime submit 'Once upon a time'", "edge-runtime down"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="edge-runtime")
def cli() -> None:
    """Serve one Mixture-of-Experts model from several unequal machines."""


for command in (
    daemons.up,
    daemons.down,
    daemons.node,
    daemons.coordinator,
    requests.submit,
    requests.batch,
    serving.gateway,
    looking.status,
    looking.doctor,
    changing.plan,
    changing.apply,
    keys.keys,
):
    cli.add_command(command)


TYPE_WORDS = {"integer": "whole number", "float": "number", "boolean": "true or false"}


def _plain(message: str) -> str:
    """click's words for what no number is, without the names of types."""
    return re.sub(
        r"(?:a )?valid (integer|float|boolean)(?: range)?\b",
        lambda found: f"{'' if found[1] == 'boolean' else 'a '}{TYPE_WORDS[found[1]]}",
        message,
    )


def main() -> NoReturn:
    """Run a command; what we foresee is one sentence and an exit code, anything else is ours and shows itself."""
    try:
        cli(prog_name="edge-runtime", standalone_mode=False)
        code = EXIT_DONE
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = EXIT_USER
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "edge-runtime"
        say(f"error: {one_line(_plain(error.format_message())).rstrip('.')}; see {path} --help")
        code = EXIT_USER
    except click.ClickException as error:
        say(f"error: {error.format_message()}")
        code = EXIT_USER
    except (TopologyError, SettingError) as error:
        say(f"error: {error}")
        code = EXIT_USER
    except EdgeError as error:
        say(f"error: {error}")
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE  # the reader went away
    except OSError as error:
        if error.errno in MENDED_BY_PEOPLE and error.filename is not None:
            say(f"error: {error.filename} cannot be used: {error.strerror}")
            sys.exit(EXIT_USER)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        say(f"error: the output cannot be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_USER
    sys.exit(code)
