"""Promises that the repository makes as a whole: names, words, files, and a README in step with the command line."""

import ast
import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

from topology.cluster import DEVICES, ROLES, WEIGHT_FORMATS
from topology.errors import ClusterFileError
from topology.parse import parse_cluster
from topology.readers import SHORT_FORMATS

PACKAGES = ("edge_runtime", "kernels", "topology", "calibration", "testbed")
SLEEPERS = {"time", "asyncio", "anyio", "trio", "gevent"}


def source_files(repository: Path, *folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    found = [path for folder in folders for path in (repository / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in suffixes and "__pycache__" not in path.parts)


def tracked_files(repository: Path) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("this copy of the sources is not a git clone")
    return [repository / name for name in listing.stdout.decode().split("\0") if name]


def sleeps_in(tree: ast.AST) -> list[int]:
    """Lines that call `sleep` of a module that really sleeps, or import it from there."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr="sleep") if module in SLEEPERS:
                lines.append(node.lineno)
            case ast.ImportFrom(module=module, names=names) if module in SLEEPERS:
                lines.extend(node.lineno for name in names if name.name == "sleep")
    return lines


def test_kernels_holds_nothing_but_a_docstring(repository):
    tree = ast.parse((repository / "kernels" / "__init__.py").read_text())
    assert len(tree.body) == 1
    assert ast.get_docstring(tree)


def test_transformers_does_not_take_our_kernels_for_the_hubs():
    import transformers.utils

    assert not transformers.utils.is_kernels_available()


def test_the_distribution_is_called_edge_runtime_and_its_version_is_the_packages(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    version = re.search(r'__version__ = "(.+)"', (repository / "edge_runtime" / "__init__.py").read_text())
    assert project["name"] == "edge-runtime"
    assert version is not None and version[1] == project["version"]
    assert importlib.metadata.version("edge-runtime") == project["version"]


def test_every_folder_of_modules_is_a_package(repository):
    for path in source_files(repository, *PACKAGES):
        if "models" not in path.relative_to(repository).parts:
            assert (path.parent / "__init__.py").exists(), f"{path.parent} lacks an __init__.py"


def test_tests_mirror_the_tree_without_being_packages(repository):
    assert not list((repository / "tests").rglob("__init__.py"))
    for path in source_files(repository, "tests"):
        place = path.parent.relative_to(repository / "tests")
        if path.name.startswith("test_") and place.parts[:1] not in {("support",), ("integration",)}:
            assert (repository / place).is_dir(), f"{path} mirrors no folder of the sources"


def test_no_test_sleeps(repository):
    for path in source_files(repository, "tests"):
        assert not sleeps_in(ast.parse(path.read_text())), f"{path} sleeps"


def test_a_planted_sleep_would_be_found():
    assert sleeps_in(ast.parse("import time\ntime.sleep(1)")) == [2]
    assert sleeps_in(ast.parse("from asyncio import sleep")) == [1]
    assert sleeps_in(ast.parse("clock.sleep(3)")) == []


def test_source_is_ascii(repository):
    suffixes = (".py", ".toml", ".cpp", ".h", ".hpp", ".txt")
    checked = source_files(repository, *PACKAGES, "tests", suffixes=suffixes)
    checked += [repository / name for name in ("pyproject.toml", "Makefile", "constraints.txt", ".ci/run")]
    for path in checked:
        assert path.read_bytes().isascii(), f"{path} is not ASCII"


def test_no_text_of_others_is_committed(repository):
    """The corpus is for development only: no archive, no folder of it, and nothing large but the demo model."""
    for path in tracked_files(repository):
        name = path.relative_to(repository)
        assert path.suffix not in {".gz", ".zst", ".xz", ".zip", ".parquet"}, name
        assert not {"corpus", "shared"} & set(name.parts), name
        if path.exists() and "models" not in name.parts:
            assert path.stat().st_size < 1_000_000, name


def test_constraints_pin_torch_and_leave_triton_to_it(repository):
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower(): line.split("==")[1] for line in lines if "==" in line}
    assert pins["torch"] == "2.13.0"
    assert "triton" not in pins
    assert not any("+" in version for version in pins.values()), "a local build is not to be had elsewhere"


def commands_of(group: click.Group, prefix: str = "") -> dict[str, click.Command]:
    """Every command by its full name, groups opened."""
    context = click.Context(group)
    found: dict[str, click.Command] = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        if isinstance(command, click.Group):
            found |= commands_of(command, f"{prefix}{name} ")
            default = getattr(
                command, "default_command", None
            )  # what the group does without a command's name
            if default is not None:
                found[f"{prefix}{name}"] = default
        else:
            found[f"{prefix}{name}"] = command
    return found


@pytest.fixture(scope="module")
def commands() -> dict[str, click.Command]:
    from edge_runtime.cli import cli

    assert isinstance(cli, click.Group)
    return commands_of(cli)


@pytest.fixture(scope="module")
def readme(repository) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def test_the_readme_shows_every_command(commands, readme):
    missing = [name for name in commands if not re.search(rf"edge-runtime {re.escape(name)}\b", readme)]
    assert not missing, f"README.md has no example of {missing}"


def test_every_command_and_option_in_the_readme_exists(commands, readme):
    for line in re.findall(r"^\s*(?:\$ )?(?:\.venv/bin/)?edge-runtime (.+)$", readme, flags=re.MULTILINE):
        words = line.split("#")[0].split()
        name = next(
            (n for n in sorted(commands, key=len, reverse=True) if f"{' '.join(words)} ".startswith(f"{n} ")),
            None,
        )
        assert name is not None, f"README.md shows `edge-runtime {line}`, which is no command"
        known = {
            option
            for parameter in commands[name].params
            for option in parameter.opts + parameter.secondary_opts
        }
        unknown = {word.split("=")[0] for word in words if word.startswith("--")} - known - {"--help"}
        assert not unknown, f"README.md gives `edge-runtime {name}` unknown options {sorted(unknown)}"


def test_every_commands_help_shows_an_example(commands):
    for name, command in commands.items():
        with click.Context(command, info_name=name) as context:
            assert f"edge-runtime {name}" in command.get_help(context), f"`{name} --help` shows no example"


def test_the_readme_explains_every_key_of_a_topology_file(readme):
    tables = {
        "cluster": "[cluster]",
        "default_node": "[default_node]",
        "node": "[[node]]",
        "link": "[[link]]",
    }
    for table, heading in tables.items():
        with pytest.raises(ClusterFileError) as refused:
            parse_cluster(f"{heading}\nnonsense = 1\n")
        (allowed,) = re.findall(r"nonsense.*allowed are (.+)", str(refused.value))
        missing = [key for key in allowed.split(", ") if f"`{key}`" not in readme]
        assert not missing, f"README.md does not explain {missing} of [{table}]"


def test_the_readme_names_every_role_device_and_weight_format(readme):
    assert not [
        word for word in (*ROLES, *DEVICES, *WEIGHT_FORMATS, *SHORT_FORMATS) if f"`{word}`" not in readme
    ]


def test_the_readmes_topology_file_is_a_topology_file(readme):
    (example,) = re.findall(r"```toml\n(.+?)```", readme, flags=re.DOTALL)
    assert parse_cluster(example).node_names == ("desk", "attic")


def test_every_module_of_topology_but_its_reader_of_files_is_held_to_values(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    (contract,) = [c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "forbidden"]
    modules = {f"topology.{path.stem}" for path in (repository / "topology").glob("*.py")}
    assert modules - {"topology.__init__", "topology.files"} <= set(contract["source_modules"])
