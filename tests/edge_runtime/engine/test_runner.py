"""One step of a runner over a range of layers, and stages put together against the whole."""

import itertools

import pytest
import torch

from edge_runtime.cache.pages import KVPages
from edge_runtime.clock import ManualClock
from edge_runtime.engine.plan import StepPlan, StepSlice
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.request_table import RequestTable
from edge_runtime.engine.runner import Runner, StagedRunner
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


def run(runner, requests: list[Request]) -> list[torch.Tensor]:
    found = []
    for plan in plans(requests):
        if plan.slices[0].start:
            for request in requests[1:]:
                request.tokens.append(41)
        result = runner.run(plan)
        assert result.failed == {} and result.hidden is None
        found.append(result.logits.clone())
    return found


@pytest.mark.parametrize("cuts", [[1], [2], [3], [1, 2, 3]])
def test_stages_put_together_give_the_bits_and_accounts_of_one_runner(whole, cuts):
    one = runner_of(whole, 0, 4)
    bounds = [0, *cuts, 4]
    staged = StagedRunner([runner_of(whole, a, b) for a, b in itertools.pairwise(bounds)])
    assert (staged.first_layer, staged.last_layer, staged.num_layers) == (0, 4, 4)
    for expected, found in zip(run(one, requests()), run(staged, requests()), strict=True):
        assert torch.equal(found, expected)
    assert one.num_accounts == 3 and staged.num_accounts == 3 * (len(cuts) + 1)
    for name in ("r0", "r1", "r2"):
        expected, found = one.take_account(name), staged.take_account(name)
        assert found.host_names == expected.host_names
        torch.testing.assert_close(found.served, expected.served)
    assert one.num_accounts == staged.num_accounts == 0


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


def test_stages_that_do_not_adjoin_are_refused(whole):
    with pytest.raises(ValueError, match="ends before layer 1 and the next begins at 2"):
        StagedRunner([runner_of(whole, 0, 1), runner_of(whole, 2, 4)])


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


def test_a_request_that_fails_in_several_stages_is_told_of_the_first(whole):
    ports = [Lacking(placed_experts(whole), layer=layer, expert=5) for layer in (0, 2)]
    staged = StagedRunner([runner_of(whole, 0, 2, ports[0]), runner_of(whole, 2, 4, ports[1])])
    result = staged.run(plans(requests())[0])
    assert result.failed["r2"] == ports[0].why


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
