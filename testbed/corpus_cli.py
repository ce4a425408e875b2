"""The command `edge-runtime testbed corpus`. Heavy imports are inside."""

from pathlib import Path

import click

SHOWN = 3


@click.command(epilog="\b\nExample:\n  edge-runtime testbed corpus corpus")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder to take text from; may be given again. Default: Python's library, installed packages, message catalogues.",
)
@click.option(
    "--chars",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(10_000),
    help="Most characters of a domain.",
)
def corpus(out: Path, roots: tuple[Path, ...], chars: int) -> None:
    """Build a labelled corpus for calibration in the new folder OUT from what this machine has.

    Sources and data of Python and its packages, docstrings, and message catalogues, a domain for each language.
    """
    from calibration.cli import shown_progress
    from testbed.corpus import build_corpus, default_roots

    with shown_progress() as progress:
        built, small = build_corpus(out, roots or default_roots(), chars_per_domain=chars, progress=progress)
    for each in built:
        splits = ", ".join(f"{count} {split}" for split, count in each.documents.items())
        click.echo(f"{each.domain}: {splits}; {each.chars} characters of {each.files} files")
    if small:
        largest = sorted(small, key=lambda name: -small[name])[:SHOWN]
        said = ", ".join(f"{name} with {small[name]} documents" for name in largest)
        click.echo(f"{len(small)} domains are too small and left out, the largest {said}", err=True)
    click.echo(f"wrote {out}; sources and licences are in {out / 'SOURCES.md'}", err=True)
