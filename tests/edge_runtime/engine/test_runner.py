"""One step of a runner over a range of layers."""

import pytest
import torch

from edge_runtime.cache.pages import KVPages
from edge_runtime.clock import ManualClock
from edge_runtime.engine.plan import StepPlan, StepSlice
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.request_table import RequestTable
from edge_runtime.engine.runner import Runner
from edge_runtime.model.decoder import Decoder
from tests.support.engines import Lacking, Whole, placed_experts, whole_model
from tests.support.tiny_models import write_tiny_qwen3_moe

NUM_BLOCKS = 16


@pytest.fixture(scope="module", params=[True, False], ids=["weights sum to 1", "weights sum to less"])
def whole(request, tmp_path_factory) -> Whole:
    """Four layers, the second of them dense."""
    folder = write_tiny_qwen3_moe(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=4,
        mlp_only_layers=[1],
        norm_topk_prob=request.param,
    )
    return whole_model(folder, 128)


def runner_of(whole: Whole, first: int, last: int, port=None) -> Runner:
    spec = whole.checkpoint.spec
    pages = KVPages(NUM_BLOCKS, spec.kv_shapes(first, last))
    decoder = Decoder(spec, whole.trunk(first, last), pages, max_rows=64)
    return Runner(decoder, port or placed_experts(whole), RequestTable(3, 128), ManualClock())


def requests() -> list[Request]:
    found = []
    for seat, length in enumerate((20, 3, 33)):
        request = Request(f"r{seat}", [(7 * i + seat) % 500 for i in range(length)], SamplingParams(), 0.0)
        request.seat, request.version = seat, seat + 1
        request.block_table = [seat, seat + 3, seat + 6]
        found.append(request)
    return found


def plans(requests: list[Request]) -> list[StepPlan]:
    """A chunk and two whole prompts, then the rest of the chunked one beside two decode rows."""
    a, b, c = requests
    first = StepPlan((StepSlice(a, 0, 16, False), StepSlice(b, 0, 3, True), StepSlice(c, 0, 33, True)), 52)
    second = StepPlan((StepSlice(b, 3, 1, True), StepSlice(c, 33, 1, True), StepSlice(a, 16, 4, True)), 6)
    return [first, second]


def test_a_stage_that_does_not_end_the_model_gives_rows_and_no_logits(whole):
    first, last = runner_of(whole, 0, 2), runner_of(whole, 2, 4)
    plan = plans(requests())[0]
    result = first.run(plan)
    assert result.logits is None and result.hidden.shape == (52, whole.checkpoint.spec.width)
    result = last.run(plan, result.hidden)
    assert result.hidden is None and result.logits.shape == (2, whole.checkpoint.spec.vocab_size)


def test_a_step_in_which_nobody_samples_gives_no_logits(whole):
    [request, *_] = requests()
    result = runner_of(whole, 0, 4).run(StepPlan((StepSlice(request, 0, 16, False),), 16))
    assert result.logits is None and result.hidden is None


def test_a_later_stage_needs_rows_and_the_first_takes_none(whole):
    plan = plans(requests())[0]
    with pytest.raises(AssertionError, match="layer 2 needs rows"):
        runner_of(whole, 2, 4).run(plan)
    with pytest.raises(AssertionError, match="starts from token ids"):
        runner_of(whole, 0, 4).run(plan, torch.zeros(52, whole.checkpoint.spec.width))


def test_missing_experts_name_the_requests_of_their_rows_and_no_account_counts_them(whole):
    class Nowhere(Lacking):
        def served_by(self):
            layer, expert_ids = self.last_run
            hosts = torch.zeros_like(expert_ids)
            hosts[(expert_ids == self._expert) & (layer == self._layer)] = -1
            return hosts.numpy()

    failing = set()
    for expert in range(8):
        port = Nowhere(placed_experts(whole), layer=3, expert=expert)
        runner, told = runner_of(whole, 0, 4, port), requests()
        result = runner.run(plans(told)[0])
        failing |= set(result.failed)
        assert set(result.failed.values()) <= {port.why}
        for request, count in zip(told, (16, 3, 33), strict=True):
            slots = runner.take_account(request.request_id).served[1].sum()
            assert (slots < count * 3 * 2) == (request.request_id in result.failed)
    assert failing == {"r0", "r1", "r2"}


def test_the_bill_counts_gate_weight_alike_where_a_layer_is_local_and_where_it_is_not(whole):
    """Weights that do not sum to 1 must not weigh more in a layer that the home serves alone."""

    class Spoken(Lacking):
        def served_by(self):
            return torch.zeros_like(self.last_run[1]).numpy()

    silent = runner_of(whole, 0, 4)
    spoken = runner_of(whole, 0, 4, Spoken(placed_experts(whole), layer=-1, expert=-1))
    for runner in (silent, spoken):
        runner.run(plans(requests())[0])
    for name in ("r0", "r1", "r2"):
        expected, found = spoken.take_account(name).served, silent.take_account(name).served
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=1e-6, atol=0)
