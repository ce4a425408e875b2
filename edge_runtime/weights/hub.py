"""Models of the hub, called `hub:org/name` or `hub:org/name@revision`: fetched once, into the hub library's own cache.

The one module that knows `huggingface_hub`, which it imports only for such a model. HF_ENDPOINT, HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE mean what they mean there. A model that is here whole is used as it is, and nobody is asked.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import ConfigError
from topology.files import HUB

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
REPORT_S = 2.0
NETWORKING = (
    "huggingface_hub",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
)  # whose errors are the network's, not ours

Say = Callable[[str], None]


def model_id(model: str) -> str | None:
    """`org/name` or `org/name@revision` if a cluster's model is one of the hub, None if it is a folder."""
    return model.removeprefix(HUB) if model.startswith(HUB) else None


def find_model(name: str) -> Path | None:
    """Its folder, if it was fetched whole before; asks nobody."""
    repo_id, _, revision = name.partition("@")
    with _quiet():
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(
                repo_id, revision=revision or None, allow_patterns=PATTERNS, local_files_only=True
            )
        except (OSError, ValueError):  # LocalEntryNotFoundError is both
            return None
    return Path(folder)


def fetch_model(name: str, say: Say, clock: Clock | None = None) -> Path:
    """Its folder; fetched first if it is not here, going on where an earlier try ended. ConfigError if that cannot be."""
    found = find_model(name)
    if found is not None:
        return found
    repo_id, _, revision = name.partition("@")
    with _quiet():
        from huggingface_hub import errors as hub_errors
        from huggingface_hub import snapshot_download

        if not _is_offline():
            say(f"fetching {name} from the hub")
        try:
            folder = snapshot_download(
                repo_id,
                revision=revision or None,
                allow_patterns=PATTERNS,
                tqdm_class=_lines(name, say, clock or SystemClock()),
            )
        except hub_errors.RevisionNotFoundError as error:
            raise ConfigError(f"model {repo_id} of the hub has no revision {revision}") from error
        except hub_errors.GatedRepoError as error:
            raise ConfigError(
                f"model {name} of the hub is gated: ask for access on its page, then log in or set HF_TOKEN"
            ) from error
        except hub_errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"the hub has no model {name}, or it is private and HF_TOKEN does not open it; "
                'a folder beside the topology file is written as model = "./folder"'
            ) from error
        except hub_errors.HFValidationError as error:
            raise ConfigError(f"{name!r} is no id of the hub; write org/name") from error
        except Exception as error:
            if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in NETWORKING:
                raise
            raise ConfigError(_why_not(name, error)) from error
    return Path(folder)


def _why_not(name: str, error: BaseException) -> str:
    """What kept a model from coming, in one sentence."""
    if _is_offline():
        return f"model {name} is not on this machine whole, and HF_HUB_OFFLINE forbids to fetch it"
    cause = error.__cause__ or error
    if isinstance(cause, OSError) and cause.strerror and not isinstance(cause, ConnectionError):
        return (
            f"model {name} cannot be kept: {cause.strerror} ({cause.filename}); HF_HOME names another folder"
        )
    said = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return f"model {name} cannot be fetched from the hub now: {said}; what came so far is kept"


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's own bars, hints and warnings: what matters is said by us."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.getLogger("huggingface_hub").level
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        try:
            yield
        finally:
            logging.getLogger("huggingface_hub").setLevel(before)


def _lines(name: str, say: Say, clock: Clock) -> type[Any]:
    """A progress bar that is a line of ours every 2 s."""
    from tqdm import tqdm

    class Lines(tqdm):
        said_s = clock.now()

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            now = clock.now()
            if self.unit == "B" and self.total and self.n and now - Lines.said_s >= REPORT_S:
                Lines.said_s = now
                say(f"fetching {name}: {self.n / 1e6:.0f} of {self.total / 1e6:.0f} MB")
            return shown

    return Lines
