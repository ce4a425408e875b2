"""Everything that two processes of a cluster can say to each other, as frozen structs.

A message says what it means and nothing of how it travels: call id, epoch of the sender, time left and tensors are
the envelope's (`codec.py`). A new field has a default; a field that a reader does not know is ignored. The tag on the
wire is the class name in snake case. This module knows no bytes, sockets or engine.
"""

import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import Meta, Struct

from edge_runtime.errors import Refusal, Whose
from topology.speeds import LinkSpeed, NodeSpeed

PROTOCOL_VERSION = 3

Count = Annotated[int, Meta(ge=0, le=2**62)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NAME_CHARS = 256
Name = Annotated[str, Meta(max_length=NAME_CHARS)]
Seconds = Annotated[float, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Scalar = int | float | bool | str | None


class TensorSpec(NamedTuple):
    """One tensor that a message carries: its name in errors, the dtypes allowed, its number of dimensions."""

    name: str
    dtypes: tuple[str, ...]
    ndim: int


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(Struct, frozen=True, tag=snake_case, tag_field="type"):
    """Root of all messages.

    tensors         what follows the header
    max_body_bytes  how long the packed fields may be
    max_containers  how many lists and maps they may hold: one of a byte or two takes over 200 in memory
    """

    tensors: ClassVar[tuple[TensorSpec, ...]] = ()
    max_body_bytes: ClassVar[int] = 64 << 10
    max_containers: ClassVar[int] = 4096


# --- who is there ---------------------------------------------------------------------------------------------------


class _Identity(Message, frozen=True):
    """Who speaks and what it would compute with.

    node          name in the topology file; of a client, any name
    cluster       name of the cluster that its topology file describes, empty if it does not matter
    model_hash, dtype, calibration_hash
                  what must be equal on both sides for their rows to mean the same; empty if not known (yet)
    numerics      which bits its kernels give: nodes that differ here still agree within rounding, so they work together,
                  but an answer's last bits then depend on the placement, which `status` tells
    incarnation   random hex, new with every start of the process
    expert_address  where this process answers ExpertCall, empty if nowhere
    role          "loader": a further connection of a node, over which it asks for weights alone
    """

    node: Name
    role: Literal["node", "home", "coordinator", "client", "loader"] = "node"
    protocol: Count = PROTOCOL_VERSION
    model_hash: Name = ""
    dtype: Name = ""
    calibration_hash: Name = ""
    numerics: Name = ""
    pid: Count = 0
    incarnation: Name = ""
    expert_address: Name = ""
    cluster: Name = ""


class Hello(_Identity, frozen=True):
    """First message on a connection. Answered by Welcome or Refused."""


class Welcome(_Identity, frozen=True):
    """The answer to Hello: the other side's identity."""


class Refused(Message, frozen=True):
    """An ordinary "no" to the message whose call id (or request id) this carries. Fields as in `Refusal`."""

    reason: Name
    detail: str
    retry_after_s: Seconds | None = None
    request_id: Name = ""

    @classmethod
    def of(cls, refusal: Refusal, request_id: str = "") -> "Refused":
        return cls(refusal.reason, str(refusal), refusal.retry_after_s, request_id)

    def as_error(self) -> Refusal:
        return Refusal(self.reason, self.detail, self.retry_after_s)


def refuse_mismatch(theirs: Hello | Welcome, ours: Hello | Welcome) -> Refused | None:
    """Say why `theirs` cannot work with `ours`, with both values; None if it can.

    A value that either side does not know yet is not compared.
    """
    if theirs.protocol != ours.protocol:
        return Refused(
            "version", f"{ours.node} speaks protocol {ours.protocol}, {theirs.node} {theirs.protocol}"
        )
    for field in ("cluster", "model_hash", "dtype", "calibration_hash"):
        found, expected = getattr(theirs, field), getattr(ours, field)
        if found and expected and found != expected:
            what = field.replace("_", " ")
            return Refused(
                field.removesuffix("_hash"), f"{what}: {ours.node} has {expected}, {theirs.node} has {found}"
            )
    return None


class NodeReport(Struct, frozen=True):
    """What a node says of itself in each heartbeat; counts are since the start of the process.

    state          "joining", "loading", "ready", "draining" or "failed"
    epoch          of the placement it serves, 0 before the first
    waiting, running  requests whose home it is
    bad_frames     messages dropped because they were not ours
    busy_s         time spent in steps and in peers' expert calls
    numbers        any further counter, by name
    speed          what its arithmetic and calls take, as it measured them; None before
    links          peer -> the link to it, as measured
    cores          processors of its machine, 0 if not known
    """

    state: Name = "joining"
    epoch: Count = 0
    rss_bytes: Count = 0
    planned_bytes: Count = 0
    kv_blocks_free: Count = 0
    kv_blocks_total: Count = 0
    waiting: Count = 0
    running: Count = 0
    tokens_generated: Count = 0
    calls_served: Count = 0
    rows_served: Count = 0
    bad_frames: Count = 0
    prefix_hits: Count = 0
    busy_s: Seconds = 0.0
    numbers: dict[str, float] = {}
    speed: NodeSpeed | None = None
    links: dict[Name, LinkSpeed] = {}
    cores: Seconds = 0.0


class Heartbeat(Message, frozen=True):
    sequence: Count
    report: NodeReport = NodeReport()


class HeartbeatReply(Message, frozen=True):
    sequence: Count


# --- who holds what -------------------------------------------------------------------------------------------------


class PeerAddress(Struct, frozen=True):
    """Where a node listens. public_key: its CURVE key (z85), empty without keys."""

    name: Name
    address: Name
    public_key: Name = ""
    expert_address: Name = ""


class Share(Struct, frozen=True):
    """What one node holds: trunk layers [first_layer, last_layer), and by layer the ids of its experts, ascending."""

    first_layer: Index = 0
    last_layer: Index = 0
    experts: list[list[Index]] = []
    kv_blocks: Count = 0


class Deploy(Message, frozen=True):
    """Load this share, then answer Deployed or DeployFailed; DeployProgress meanwhile.

    stages    indices into `peers` of the decode group that the node runs layers of, in the order of the layers; one or
              none if it runs all of them or none; first_layers: where the layers of each of these begin
    epoch     of the placement to load
    counts_now  it is the one being served; otherwise Activate says when it is
    hosts     by layer, by expert: indices into `peers` of the nodes that hold it; a dense layer is an empty list
    settings  the engine's plain settings by name; the receiver checks them
    """

    max_body_bytes: ClassVar[int] = 2 << 20
    max_containers: ClassVar[int] = 1 << 16  # 61 layers of 256 experts are 15,677

    epoch: Count
    share: Share
    hosts: list[list[list[Index]]] = []
    peers: list[PeerAddress] = []
    settings: dict[str, Scalar] = {}
    model_hash: Name = ""
    counts_now: bool = True
    stages: list[Index] = []
    first_layers: list[Index] = []


class DeployProgress(Message, frozen=True):
    epoch: Count
    bytes_done: Count
    bytes_total: Count
    what: str = ""


class Deployed(Message, frozen=True):
    epoch: Count
    weight_bytes: Count
    rss_bytes: Count = 0


class DeployFailed(Message, frozen=True):
    """whose  fault it is: "user" where the model is damaged (exit code 2), "cluster" otherwise (exit code 3)"""

    epoch: Count
    reason: str
    whose: Whose = "cluster"


class PeersChanged(Message, frozen=True):
    """The nodes that are alive now, by name; all others of the epoch's placement are lost.

    replacing  another placement is on its way that gives every expert a host again: steps that lack one may wait
    """

    epoch: Count
    alive: list[Name]
    replacing: bool = False


class Activate(Message, frozen=True):
    """The placement of this epoch, which is loaded, counts from the next step on. Answered by Activated."""

    epoch: Count


class Activated(Message, frozen=True):
    """No step of an older epoch is under way here, and none will begin."""

    epoch: Count


class Release(Message, frozen=True):
    """Forget the placement of this epoch: no step needs it, or it was rolled back."""

    epoch: Count


# --- weights --------------------------------------------------------------------------------------------------------


class FileEntry(Struct, frozen=True):
    """One file of a model. head_bytes: what every node needs of it, from its beginning; all but the tensors."""

    name: Name
    num_bytes: Count
    head_bytes: Count


class ManifestQuery(Message, frozen=True):
    """From a node that lacks the model's folder: what is the model made of? Answered by Manifest."""


class Manifest(Message, frozen=True):
    """The files of the model, in an order that all processes share.

    tied_head  whether the head is the embedding, which only the whole files tell
    """

    max_body_bytes: ClassVar[int] = 1 << 20

    model_hash: Name
    files: list[FileEntry]
    tied_head: bool = False


class RangesQuery(Message, frozen=True):
    """Which of these chunks, (file, start, end), do you have? Answered by RangesHeld.

    wants_digests  and what are their digests? Only the coordinator says: it is whom the nodes believe
    """

    max_body_bytes: ClassVar[int] = 128 << 10

    model_hash: Name
    chunks: list[tuple[Index, Count, Count]]
    wants_digests: bool = False


class RangesHeld(Message, frozen=True):
    """By chunk of the query, whether it is here; and its digest, if that was asked for."""

    max_body_bytes: ClassVar[int] = 128 << 10

    held: list[bool]
    digests: list[Name] = []


class ChunkQuery(Message, frozen=True):
    """Send the bytes of one chunk. Answered by ChunkData."""

    model_hash: Name
    file: Index
    start: Count
    end: Count


class ChunkData(Message, frozen=True):
    """The bytes that were asked for: data [end - start] uint8. Whoever takes them compares their digest."""

    max_body_bytes: ClassVar[int] = 1 << 10
    tensors: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("data", ("uint8",), 1),)

    file: Index
    start: Count


# --- the token path -------------------------------------------------------------------------------------------------


class ExpertCall(Message, frozen=True):
    """Run experts of one layer for rows of a step.

    rows          [Rq, D] float32 | bfloat16   each row once, however many of its experts are asked for
    pair_rows     [P]     int32                index into rows: 0..Rq-1 (the receiver checks the values)
    pair_experts  [P]     int32                the expert to apply to that row
    """

    max_body_bytes: ClassVar[int] = 1 << 10
    tensors: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("rows", ("float32", "bfloat16"), 2),
        TensorSpec("pair_rows", ("int32",), 1),
        TensorSpec("pair_experts", ("int32",), 1),
    )

    layer: Index


class SlicedCall(Message, frozen=True):
    """Run parts of experts of one layer for rows of a step: an ExpertCall whose pairs say which slices they want.

    masks      [P] int32   bit s for slice s of `num_parts` equal runs of the expert's neurons
    Answered by ExpertReply.
    """

    max_body_bytes: ClassVar[int] = 1 << 10
    tensors: ClassVar[tuple[TensorSpec, ...]] = (
        *ExpertCall.tensors,
        TensorSpec("masks", ("int32",), 1),
    )

    layer: Index
    num_parts: Annotated[int, Meta(ge=1, le=8)] = 1


class ExpertReply(Message, frozen=True):
    """The answer to ExpertCall: outputs [P, D] float32, unweighted, in the order of the pairs.

    compute_s  time the host spent computing, without the wire
    """

    max_body_bytes: ClassVar[int] = 1 << 10
    tensors: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("outputs", ("float32", "bfloat16"), 2),)

    layer: Index
    compute_s: Seconds = 0.0


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural logarithms: of the token chosen, and of the best ones as [token id, logprob] pairs, best first."""

    token_id: Index
    logprob: float
    top: list[tuple[Index, float]] = []


class Choice(Struct, frozen=True, array_like=True):
    """How a row's token is to be chosen, where it is not simply the best one. Fields as in the engine's SamplingParams.

    sample      which of the step's sampling requests, in slice order
    num_tokens  of its tokens so far that travel with the step: all, if it has a repetition penalty, else none
    """

    sample: Index
    temperature: float = 0.0
    top_k: Count = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: Index | None = None
    num_tokens: Index = 0


class Allowance(Struct, frozen=True, array_like=True):
    """A row that may spend quality, and has spent some at the stages so far.

    row           of the step's rows
    left, price   loss that it may still spend in this step; seconds of waiting that a unit of it is worth
    spent         loss so far
    deviates      how far stand-ins and what is left out have moved it so far, before that is squared
    substituted, deferred, dropped  gate weight that stand-ins served, that came a layer late, and that was left out
    reserved      loss that its tier is expected to cost in this step; dropped_loss: what it has cost so far
    """

    row: Index
    left: Amount
    price: Amount
    spent: Amount = 0.0
    deviates: Amount = 0.0
    substituted: Amount = 0.0
    deferred: Amount = 0.0
    dropped: Amount = 0.0
    reserved: Amount = 0.0
    dropped_loss: Amount = 0.0


class LayerTrace(Struct, frozen=True, array_like=True):
    """How a layer served one slice's gate weight: exactly at the stage's node, exactly elsewhere, by stand-ins, a layer late,
    not at all.
    """

    slice: Index
    layer: Index
    weights: tuple[Amount, Amount, Amount, Amount, Amount]


class StageStep(Message, frozen=True):
    """From a stage to the next: go on with the rows of one step. Answered by a StageResult to the group's first stage.

    rows     [T, D] float32  the residual after the sender's layers
    slices   [S, 4] int32    of each request: first position, rows, whether its last row samples, its encoder's tokens
    blocks   [B]    int32    the block tables, one after another, each as long as its request's rows need
    tokens   [n]    int32    tokens so far of the requests that have a penalty, one after another
    served   [S, 1 + 2H] float32  gate weight and slots of the stages so far: weight at their own nodes, then by host
             weight, then by host slots
    counts   [c, L, E] int16 which experts the prompts of `counted` chose, in the L MoE layers so far; [0, 0, 0] for none

    run      whose keys and values the blocks hold: new with every engine, and whenever it starts over
    opens    nothing is in the blocks yet; without it a stage that does not know the run takes no step of it
    step     ascending within a run
    hosts    H names, for the columns of `served`
    failed   slices whose experts did not come, each with why
    seconds  that the stages so far have computed, each in turn
    tiers    sub-experts of each slice's rows, 0 for all; empty where all run everything
    dropped  of each slice, where there are tiers: gate weight left out so far, expected loss, slices that ran, and of how
             many rows times layers
    allowances   rows that may spend quality
    start_price  what a unit of quality is worth before any was spent, as far as a stage knows
    traced   slices of requests that want to know how each layer was served; trace: of the stages so far
    counted  slices that end a prompt whose choices of experts are wanted
    """

    max_body_bytes: ClassVar[int] = 1 << 20
    max_containers: ClassVar[int] = 1 << 15  # a trace has two for each slice and layer
    tensors: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("rows", ("float32",), 2),
        TensorSpec("slices", ("int32",), 2),
        TensorSpec("blocks", ("int32",), 1),
        TensorSpec("tokens", ("int32",), 1),
        TensorSpec("served", ("float32",), 2),
        TensorSpec("counts", ("int16",), 3),
    )

    run: Name
    step: Count
    opens: bool = False
    choices: list[Choice] = []
    hosts: list[Name] = []
    failed: list[tuple[Index, str]] = []
    seconds: list[Seconds] = []
    tiers: list[Index] = []
    dropped: list[tuple[Amount, Amount, Amount, Amount]] = []
    allowances: list[Allowance] = []
    start_price: Amount = 0.0
    traced: list[Index] = []
    trace: list[LayerTrace] = []
    counted: list[Index] = []


class StageResult(Message, frozen=True):
    """From the last stage to the first: what a step chose. From any stage to the first: that it did not happen.

    outcome    "ran"; "waits": experts may have another host soon; "unknown run": the blocks do not hold what the step
               needs; "lost": it cannot reach the last stage, or what came is no step
    why        for people, unless it ran
    token_ids  of the sampling requests, in slice order; -1 where the logits are not finite
    logprobs   likewise; empty if nobody asked
    hosts, failed, seconds, dropped, allowances, start_price, trace, served [S, 1 + 2H], counts [c, L, E]
               as in StageStep, all stages together
    """

    max_body_bytes: ClassVar[int] = 2 << 20
    max_containers: ClassVar[int] = 1 << 15
    tensors: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("served", ("float32",), 2),
        TensorSpec("counts", ("int16",), 3),
    )

    run: Name
    step: Count
    outcome: Literal["ran", "waits", "unknown run", "lost"] = "ran"
    why: str = ""
    token_ids: list[Annotated[int, Meta(ge=-1, le=2**31 - 1)]] = []
    logprobs: list[TokenLogprobs | None] = []
    hosts: list[Name] = []
    failed: list[tuple[Index, str]] = []
    seconds: list[Seconds] = []
    dropped: list[tuple[Amount, Amount, Amount, Amount]] = []
    allowances: list[Allowance] = []
    start_price: Amount = 0.0
    trace: list[LayerTrace] = []


class Probe(Message, frozen=True):
    """Measures the way to a node: it sends the numbers back. Answered by Probed."""

    max_body_bytes: ClassVar[int] = 1 << 10
    tensors: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("numbers", ("float32",), 1),)


class Probed(Message, frozen=True):
    """The answer to Probe: its numbers."""

    max_body_bytes: ClassVar[int] = 1 << 10
    tensors: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("numbers", ("float32",), 1),)


# --- requests -------------------------------------------------------------------------------------------------------


class _Prompt(Message, frozen=True):
    """A request for text. Exactly one of prompt, messages and prompt_ids is given.

    messages    a chat: maps with "role" and "content", for the model's chat template
    sampling    fields of the engine's SamplingParams by name; the engine checks them
    output_ids  tokens already delivered: the answer goes on after them (a request that moved home)
    credit      how many Tokens messages may be on their way before a Credit is awaited
    trace       whether Finished tells where the gate weight of each layer was served
    ledger      of a request with a quality budget that moved home: what its own ledger holds, and what it has spent
    user        whose quality budget it spends from, together with the user's other requests; empty: one of its own
    stream      whether Tokens are wanted as they come, or one Tokens with everything
    """

    max_body_bytes: ClassVar[int] = 2 << 20
    max_containers: ClassVar[int] = 1 << 14

    request_id: Name
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[Index] | None = None
    sampling: dict[str, int | float | bool | str | list[int | str] | None] = {}
    output_ids: list[Index] = []
    salt: Name = ""
    credit: Count = 64
    trace: bool = False
    stream: bool = True
    user: Name = ""
    ledger: list[float] = []


class Submit(_Prompt, frozen=True):
    """From a client to the coordinator."""


class Timing(Struct, frozen=True):
    """Seconds of one request at its home: waiting, prompt, answer; to the first token; per further token."""

    queued_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    ttft_s: Seconds = 0.0
    tpot_s: Seconds = 0.0


class Served(Struct, frozen=True):
    """What a request cost so far: `hosts` by name, the home first; `served` [2][hosts], gate weight and slots.

    here   gate weight served where its rows were; None: what the first host served
    trace  of a request that asked for it, by layer: its number, and gate weight by `quality.WAYS`
    """

    hosts: list[Name] = []
    served: list[list[float]] = []
    here: float | None = None
    trace: list[list[float]] = []


class Handoff(Struct, frozen=True):
    """What another node has done of a request: computed its prompt, and chosen its first token.

    source         that node: it hands on KV blocks as long as it has them; without address if it is gone
    cached_tokens  prompt tokens that it found in its KV
    timing         until the first token
    """

    source: PeerAddress
    cached_tokens: Count = 0
    timing: Timing = Timing()
    served: Served = Served()


class Generate(_Prompt, frozen=True):
    """From the coordinator to the node that becomes the request's home.

    prefill_only  compute the prompt and the first token, and leave the rest to another: answered by Prefilled unless the
                  answer ends there
    handoff       another node computed the prompt: its blocks are fetched, as far as they are not here
    """

    prefill_only: bool = False
    handoff: Handoff | None = None


class Prefilled(Message, frozen=True):
    """The prompt is computed and the first token delivered: the request waits for its decode home.

    counts  [L, E] int16, how many prompt tokens chose each expert; empty where nothing is counted
    hashes  [n, 16] uint8, content hashes of the prompt's blocks, in order, the last one too if it is not full
    """

    tensors: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("counts", ("int16",), 2),
        TensorSpec("hashes", ("uint8",), 2),
    )

    request_id: Name
    prompt_tokens: Count
    cached_tokens: Count = 0
    timing: Timing = Timing()
    served: Served = Served()


class Prefilling(Message, frozen=True):
    """A part of a prompt is computed that another node will go on with: its blocks may begin to travel.

    counts  [L, E] int16, how many of its tokens so far chose each expert; empty where nothing is counted
    hashes  [n, 16] uint8, content hashes of its full blocks so far, in order
    """

    tensors: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("counts", ("int16",), 2),
        TensorSpec("hashes", ("uint8",), 2),
    )

    request_id: Name


class FetchAhead(Message, frozen=True):
    """From the coordinator to the likely home of a request: fetch these blocks of its prompt, the rest of which is computed.

    A Generate for it follows, or an Abort. hashes [n, 16] uint8, content hashes in order
    """

    tensors: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("hashes", ("uint8",), 2),)

    request_id: Name
    source: PeerAddress


class KvFetch(Message, frozen=True):
    """From node to node: hand on the KV blocks of these content hashes [n, 16] uint8, in order. Answered by KvBlocks."""

    max_body_bytes: ClassVar[int] = 1 << 10
    tensors: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("hashes", ("uint8",), 2),)


class KvBlocks(Message, frozen=True):
    """The answer to KvFetch: the first m of the blocks, fewer than asked for where a block is not there any more.

    rows    [m, floats of a block] float32: keys and values of all layers, as `KVPages.read` lays them out
    counts  [m, L * E] int8: what their tokens chose; no columns where nothing is counted
    checks  [m] int64: crc32 of each block's bytes, rows and counts
    """

    max_body_bytes: ClassVar[int] = 1 << 10
    tensors: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("rows", ("float32",), 2),
        TensorSpec("counts", ("int8",), 2),
        TensorSpec("checks", ("int64",), 1),
    )


class Attach(Message, frozen=True):
    """From a client whose coordinator was gone: go on with an answer. Answered by Accepted and what the client lacks.

    num_tokens, num_chars  of the answer, which the client has
    """

    request_id: Name
    num_tokens: Count = 0
    num_chars: Count = 0
    credit: Count = 64


class Accepted(Message, frozen=True):
    """The request is queued at `node`; its tokens follow."""

    request_id: Name
    node: Name


class Tokens(Message, frozen=True):
    """Part of an answer. index: how many tokens of the answer came before; text: what they add, whole characters.

    ledger  from a home, of a request with a quality budget: what its own ledger holds, and what it has spent
    """

    request_id: Name
    index: Count
    token_ids: list[Index]
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    ledger: list[float] = []

    max_body_bytes: ClassVar[int] = 2 << 20
    max_containers: ClassVar[int] = (
        1 << 17
    )  # a whole answer at once, with 20 logprobs for each of 6,000 tokens


class Finished(Message, frozen=True):
    """The end of an answer.

    cached_tokens  prompt tokens whose KV was there already
    nodes          by node name, what it did for this request (counts and seconds by name)
    bill           share of gate weight served exactly here, exactly elsewhere, ... by name
    trace          one map per layer with experts, if asked for: who runs it, and where its gate weight was served
    """

    max_body_bytes: ClassVar[int] = 2 << 20
    max_containers: ClassVar[int] = 1 << 16  # a trace has several for each step

    request_id: Name
    finish_reason: Literal["stop", "length", "abort"]
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0
    timing: Timing = Timing()
    nodes: dict[str, dict[str, Any]] = {}
    bill: dict[str, Any] = {}
    trace: list[dict[str, Any]] | None = None


class Failed(Message, frozen=True):
    """The end of a request that cannot be answered.

    kind     whose fault: "user" (exit code 2) or "cluster" (exit code 3)
    reason   one word for programs; detail: one sentence for people
    node, experts  who was missing, and which experts as [layer, index] pairs
    option   which option of the request is wrong, `prompt` for what is asked; empty where it is none
    """

    request_id: Name
    kind: Whose
    reason: Name
    detail: str
    node: Name = ""
    experts: list[tuple[Index, Index]] = []
    option: Name = ""


class StillRunning(_Prompt, frozen=True):
    """From a home to a coordinator that does not know of it: this request runs here, or has just ended.

    output_ids  its tokens so far, text and logprobs what clients were told with them
    ended       how it ended, if it has
    """

    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    ended: Finished | Failed | None = None


class Abort(Message, frozen=True):
    """Stop the request and free what it holds. Answered by Finished with reason "abort", if it was still known."""

    request_id: Name


class Credit(Message, frozen=True):
    """`count` more Tokens messages of this request may be sent."""

    request_id: Name
    count: Count


# --- operations -----------------------------------------------------------------------------------------------------


class Apply(Message, frozen=True):
    """From a client: change the running cluster to this topology file.

    text    the whole file
    source  its path: what it names is relative to it
    only_plan  change nothing; answered by Planned
    Answered by Applying, or Refused with all its faults; `status` then tells how far the change is.
    """

    max_body_bytes: ClassVar[int] = 2 << 20

    text: str
    source: str = ""
    only_plan: bool = False


class Drain(Message, frozen=True):
    """From a client: move everything off a node, then let it stop. Answered by Applying, or Refused."""

    node: Name


class Applying(Message, frozen=True):
    """The change has begun: nodes load their shares of this epoch. 0: the file changes nothing."""

    epoch: Count


class Planned(Message, frozen=True):
    """What a topology file would change, as a plain map and, as `text`, for people."""

    max_body_bytes: ClassVar[int] = 2 << 20
    max_containers: ClassVar[int] = 1 << 16

    text: str
    body: dict[str, Any]


class GiveUp(Message, frozen=True):
    """From a client: the change to this epoch cannot work out (a node's process ended): roll it back, if it still loads."""

    epoch: Count
    why: str = ""


class StatusQuery(Message, frozen=True):
    pass


class StatusReply(Message, frozen=True):
    """What `status --json` prints, as a plain map."""

    max_body_bytes: ClassVar[int] = 2 << 20
    max_containers: ClassVar[int] = 1 << 14  # of 2,000 nodes

    body: dict[str, Any]


class ShapeLink(Message, frozen=True):
    """Change one direction of an emulated link; what is None stays. Answered by LinkShaped, by processes that shape.

    cut_s  nothing passes for so long; 0: until it is reset
    reset  first make the link what it was at the start
    """

    source: Name
    target: Name
    delay_s: Seconds | None = None
    jitter_s: Seconds | None = None
    rate_bps: Annotated[float, Meta(gt=0)] | None = None
    loss: Annotated[float, Meta(ge=0, lt=1)] | None = None
    cut_s: Seconds | None = None
    reset: bool = False


class LinkShaped(Message, frozen=True):
    """What one direction of a link is like now. rate_bps None: no limit; cut_s None: until it is reset."""

    source: Name
    target: Name
    delay_s: Seconds = 0.0
    jitter_s: Seconds = 0.0
    rate_bps: Annotated[float, Meta(gt=0)] | None = None
    loss: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    is_cut: bool = False
    cut_s: Seconds | None = None


class Stop(Message, frozen=True):
    """Refuse new work, finish what runs, then end. Answered by Stopping."""

    reason: str = ""


class Stopping(Message, frozen=True):
    """This process goes away on purpose: do not wait for it."""

    reason: str = ""


def _concrete(root: type[Message]) -> list[type[Message]]:
    found = [] if root.__name__.startswith("_") or root is Message else [root]
    return found + [cls for child in root.__subclasses__() for cls in _concrete(child)]


MESSAGES: dict[str, type[Message]] = {snake_case(cls.__name__): cls for cls in _concrete(Message)}
