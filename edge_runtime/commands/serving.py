"""The command that serves a running cluster to others: `gateway`."""

from pathlib import Path

import click

from edge_runtime.clock import wall_s
from edge_runtime.commands.shared import Finite, example, open_client, say, topology_option
from edge_runtime.config import resolve_topology_path
from edge_runtime.log import setup_logging
from topology.files import read_cluster


@click.command(
    epilog=example(
        "edge-runtime gateway --topology topology.toml",
        "edge-runtime gateway --listen 0.0.0.0:8000 --api-key-file api.key",
    )
)
@topology_option
@click.option(
    "--listen", "address", default="127.0.0.1:8000", show_default=True, help="host:port to serve HTTP on."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="The first line is the key that clients send as bearer token; required unless only this machine is served.",
)
@click.option("--model-name", default=None, help="What clients call the model.  [default: its folder's name]")
@click.option(
    "--wait",
    "wait_s",
    type=Finite(min=0),
    default=10.0,
    show_default=True,
    help="Seconds that a request waits for a cluster that loads.",
)
def gateway(
    topology: Path | None, address: str, api_key_file: Path | None, model_name: str | None, wait_s: float
) -> None:
    """Serve the OpenAI API over HTTP until Ctrl-C: chat completions, completions, models."""
    from edge_runtime.gateway import server
    from edge_runtime.gateway.answering import Answering
    from edge_runtime.gateway.app import Gateway
    from edge_runtime.model.tokenizer import Tokenizer
    from edge_runtime.weights.locate import whole_folder

    cluster = read_cluster(resolve_topology_path(topology))
    setup_logging("gateway")
    api_key = server.read_api_key(api_key_file, address)
    tokenizer = Tokenizer.open(whole_folder(cluster, say))
    open_client(cluster).close()  # what is wrong with its keys is said before anything is served
    name = model_name or Path(cluster.model).name
    served = Gateway(
        Answering(lambda: open_client(cluster), wait_s),
        model=name,
        api_key=api_key,
        wall_s=wall_s,
        token_text=lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False),
    )
    with server.listen(address) as listening:
        host, port = listening.getsockname()[:2]
        say(f"serving {name} at http://{host}:{port}/v1; stop with Ctrl-C")
        server.serve(served.app(), listening)
