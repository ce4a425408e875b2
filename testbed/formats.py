"""Perplexity and bytes of a model in every weight format: `python -m testbed.formats --text FILE...`.

Reads text given by the user: one document a line of jsonl (its "text"), parts of some 4,000 characters otherwise. Of each
document the first window is read, in one step; every token from the second on counts. A format is that of the routed experts
(a node's `weight_format`), or, as "int8/int4", of experts and trunk (its `trunk_format`). Knows no cluster.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer

from calibration.corpus import read_documents
from edge_runtime.cache.pages import KVPages
from edge_runtime.errors import CorpusError
from edge_runtime.model.attention import AttentionBatch
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.moe import LocalExperts
from kernels.packing import FORMATS, KV_BLOCK_TOKENS
from testbed.carried import DEMO_MODEL
from topology.ids import ExpertId
from topology.readers import SHORT_FORMATS

AS_STORED = "as_stored"
BOTH = ("int8/int8", "int4/int8", "int4/int4")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    formats: str
    perplexity: float
    """Geometric mean over all tokens that were predicted."""
    tokens: int
    expert_bytes: int
    trunk_bytes: int


def windows(
    paths: Sequence[Path], tokenizer: Tokenizer, length: int, most: int | None
) -> Iterator[list[int]]:
    """The first `length` token ids of each document, of at most `most` documents of each file."""
    for path in paths:
        for text in islice(read_documents(path), most):
            yield tokenizer.encode(text).ids[:length]


class Model:
    """A whole model on this machine that can change format."""

    def __init__(self, folder: Path, context_tokens: int | None) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.spec = spec = self.checkpoint.spec
        self.context_tokens = min(context_tokens or spec.context_tokens, spec.context_tokens)
        num_blocks = -(-self.context_tokens // KV_BLOCK_TOKENS)
        self._pages = KVPages(num_blocks, spec.kv_shapes(0, spec.num_layers))
        self.tables = torch.arange(num_blocks, dtype=torch.int32)[None]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def measure(self, formats: str, texts: Sequence[Sequence[int]]) -> Row:
        """Read all texts with the experts in this format, and the trunk in another if there are two."""
        weight_format, trunk_format = parted(formats)
        trunk = load_trunk(
            self.checkpoint,
            self.spec,
            0,
            self.spec.num_layers,
            context_tokens=self.context_tokens,
            trunk_format=trunk_format,
        )
        decoder = Decoder(self.spec, trunk, self._pages, max_rows=self.context_tokens)
        layers = [(index, layer.gate) for index, layer in enumerate(self.spec.layers) if layer.gate]
        wanted = [ExpertId(index, i) for index, gate in layers for i in range(gate.num_experts)]
        store = load_experts(self.checkpoint, self.spec, wanted, weight_format=weight_format)
        port, nats, count = LocalExperts(store), 0.0, 0
        for ids in texts:
            nats += self._nats(ids, decoder, port)
            count += len(ids) - 1
        perplexity = math.exp(nats / count) if count else math.nan
        return Row(formats, perplexity, count, store.nbytes, trunk.nbytes)

    def _nats(self, ids: Sequence[int], decoder: Decoder, port: LocalExperts) -> float:
        """The negative log likelihood of a text's tokens after the first."""
        T = len(ids)
        token_ids, positions = torch.tensor(ids, dtype=torch.int32), torch.arange(T, dtype=torch.int32)
        batch = AttentionBatch(positions, positions.clone(), torch.zeros(T, dtype=torch.int32), self.tables)
        logits = decoder.head(decoder.run(token_ids, batch, port))[:-1]
        chosen = logits.gather(1, token_ids[1:, None].long())[:, 0]
        return float((logits.logsumexp(dim=1) - chosen).double().sum())


def parted(formats: str) -> tuple[str, str]:
    """Format of the experts and of the trunk: "int8/int4", or "int8" with the trunk as stored."""
    weight_format, _, trunk_format = formats.partition("/")
    trunk_format = trunk_format or AS_STORED
    return SHORT_FORMATS.get(weight_format, weight_format), SHORT_FORMATS.get(trunk_format, trunk_format)


def table(rows: Sequence[Row]) -> str:
    """The rows as markdown; change against the first."""
    lines = [
        "| experts, trunk in | perplexity | change | MB of experts | of trunk |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        change = f"{(row.perplexity / rows[0].perplexity - 1) * 100:+.2f} %"
        sizes = f"{row.expert_bytes / 1e6:.2f} | {row.trunk_bytes / 1e6:.2f}"
        lines.append(f"| {', '.join(parted(row.formats))} | {row.perplexity:.3f} | {change} | {sizes} |")
    lines.append(f"\n{rows[0].tokens} tokens predicted.")
    return "\n".join(lines)


@click.command()
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    required=True,
    help="Text to read: plain, .jsonl or .jsonl.gz; may be given again, and more may follow as arguments.",
)
@click.argument("more", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True), default=DEMO_MODEL, help="Folder of a model."
)
@click.option("--formats", "names", default=",".join((AS_STORED, *FORMATS, *BOTH)), show_default=True)
@click.option("--context", type=click.IntRange(2), default=None, help="Tokens a window; default the model's.")
@click.option(
    "--documents", "most", type=click.IntRange(1), default=None, help="At most so many of each file."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list for scripts.")
def main(
    texts: tuple[Path, ...],
    more: tuple[Path, ...],
    model: Path,
    names: str,
    context: int | None,
    most: int | None,
    as_json: bool,
) -> None:
    """Print perplexity and bytes of a model with its experts in each format."""
    allowed = (AS_STORED, *FORMATS)
    wanted = names.split(",")
    if wrong := [name for name in wanted if not {*parted(name)} <= {*allowed}]:
        raise click.BadParameter(f"formats: found {', '.join(wrong)}, expected some of {', '.join(allowed)}")
    loaded = Model(model, context)
    try:
        read = list(windows((*texts, *more), loaded.tokenizer, loaded.context_tokens, most))
    except CorpusError as error:
        raise click.BadParameter(str(error)) from error
    read = [ids for ids in read if len(ids) > 1]
    if not read:
        raise click.BadParameter(
            "text: found no token to predict, expected at least two tokens of one document"
        )
    rows = []
    for name in wanted:
        rows.append(loaded.measure(name, read))
        click.echo(f"{name}: {rows[-1].perplexity:.3f}", err=True)
    click.echo(json.dumps([asdict(row) for row in rows]) if as_json else table(rows))


if __name__ == "__main__":
    main()
