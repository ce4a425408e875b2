"""A request at its home: what comes in wrong is refused, what goes out is whole, and another home's answer goes on."""

import numpy as np
import pytest

from edge_runtime.engine.bill import Account
from edge_runtime.engine.engine import Ended, Output
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.errors import RequestError
from edge_runtime.model.spec import EncoderSpec
from edge_runtime.model.tokenizer import Tokenizer
from edge_runtime.node.answers import AnswerStream
from edge_runtime.node.requests import HomeRequest, account_of, ended_by, make_request
from edge_runtime.protocol import Failed, Finished, Generate, Prefilled, Served, Tokens
from tests.support.greedy import MODEL as DEMO_MODEL

SAMPLING = {"max_tokens": 40, "seed": 1}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(DEMO_MODEL)


def home_of(tokenizer, *, output_ids=(), **sampling):
    generate = Generate("r", prompt="Once", sampling=SAMPLING | sampling, output_ids=list(output_ids))
    request = make_request(generate, tokenizer, vocab_size=8192, context_tokens=512, now=0.0)
    stream = AnswerStream(tokenizer.stream(), request.params.stop)
    return HomeRequest(request, stream, "n1", asked=generate)


def told(home, ids, last="length"):
    """What the client gets of these tokens: ids, text, and the end."""
    messages = []
    for index, token_id in enumerate(ids):
        ended = Ended(home.request, last, "", 1.0) if index == len(ids) - 1 else None
        found, abort = home.take(Output("r", token_id, None, ended))
        messages += found
        if abort:
            messages += home.take(Output("r", None, None, Ended(home.request, "abort", "", 1.0)))[0]
            break
    ids = [token for message in messages if isinstance(message, Tokens) for token in message.token_ids]
    return ids, "".join(message.text for message in messages if isinstance(message, Tokens)), messages[-1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of prompt, messages and prompt_ids"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one of prompt, messages and prompt_ids"),
        ({"prompt": ""}, "empty"),
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [8192]}, "8192"),
        ({"prompt_ids": [1] * 512}, "512 tokens but the context holds 512"),
        ({"prompt": "a", "sampling": {"temperature": -1.0, "seed": 1}}, "temperature"),
        ({"prompt": "a", "sampling": {"heat": 1, "seed": 1}}, "heat"),
        ({"prompt": "a", "sampling": {}}, "seed"),
        ({"messages": [{"content": "no role"}]}, "role"),
        ({"prompt": "a", "output_ids": [8_000_000]}, "outside 0 to 8191"),
        ({"prompt": "a", "ledger": [1.0]}, "expected what it holds and what was spent"),
        ({"prompt": "a", "ledger": [1.0, float("inf")]}, "both 0 or more"),
        ({"prompt": "a", "ledger": [-1.0, 0.0]}, "both 0 or more"),
        ({"prompt": "a" * 2_000_000}, "2000000 characters, which are at least"),
        ({"messages": [{"role": "user", "content": "a" * 2_000_000}]}, "2000000 characters"),
    ],
)
def test_what_cannot_be_served_is_the_users_fault_in_one_sentence(tokenizer, fields, message):
    generate = Generate("r", **({"sampling": SAMPLING} | fields))
    with pytest.raises(RequestError, match=message) as caught:
        make_request(generate, tokenizer, vocab_size=8192, context_tokens=512, now=0.0)
    assert "\n" not in str(caught.value)


def test_the_parts_of_an_answer_are_the_whole_text(tokenizer):
    ids = tokenizer.encode("caf\u00e9 \U0001f600 \u4f60\u597d")[1:]
    found, text, end = told(home_of(tokenizer), ids)
    assert (found, text) == (ids, tokenizer.decode(ids))
    assert isinstance(end, Finished) and end.completion_tokens == len(ids) and end.finish_reason == "length"


def test_a_stop_string_ends_the_answer_and_what_the_engine_still_brings_is_swallowed(tokenizer):
    ids = tokenizer.encode("one two three four five six")[1:]
    found, text, end = told(home_of(tokenizer, stop=["three"]), ids)
    assert text == "one two " and end.finish_reason == "stop"
    assert found == ids[: len(found)] and len(found) < len(ids)


@pytest.mark.parametrize("cut", range(1, 8))
def test_another_home_goes_on_with_an_answer_as_if_it_had_begun_it(tokenizer, cut):
    ids = tokenizer.encode("a caf\u00e9 \U0001f600 with three more words and the end")[1:]
    whole = told(home_of(tokenizer, stop=["the end", "\U0001f600 wither"]), ids)
    first, second = home_of(tokenizer, stop=["the end", "\U0001f600 wither"]), None
    begun = [first.take(Output("r", token_id, None, None))[0] for token_id in ids[:cut]]
    second = home_of(tokenizer, stop=["the end", "\U0001f600 wither"], output_ids=ids[:cut])
    assert second.resume((2,), 512, 1.0) is None
    _, rest, end = told(second, ids[cut:])
    assert "".join(message.text for messages in begun for message in messages) + rest == whole[1]
    assert (end.finish_reason, end.completion_tokens) == (whole[2].finish_reason, whole[2].completion_tokens)


@pytest.mark.parametrize(
    ("sampling", "output_ids", "reason"),
    [
        ({}, [9, 2], "stop"),
        ({"ignore_eos": True}, [9, 2], None),
        ({"stop_token_ids": [9]}, [8, 9], "stop"),
        ({"max_tokens": 2}, [8, 9], "length"),
        ({}, [8, 9], None),
        ({}, [], None),
    ],
)
def test_an_answer_whose_last_token_ended_it_is_over_at_once(tokenizer, sampling, output_ids, reason):
    ended = home_of(tokenizer, output_ids=output_ids, **sampling).resume((2,), 512, 1.0)
    assert (ended.finish_reason if ended else None) == reason


def test_a_failure_says_whose_it_is(tokenizer):
    home = home_of(tokenizer)
    [failed], _ = home.take(
        Output("r", None, None, Ended(home.request, "error", "no living node holds it", 1.0))
    )
    assert failed == Failed("r", "cluster", "experts", "no living node holds it", node="n1")
    [failed], _ = home.take(Output("r", None, None, Ended(home.request, "error", "too long", 1.0, True)))
    assert (failed.kind, failed.reason) == ("user", "request")


def test_with_an_encoder_the_prompt_is_what_it_reads_and_the_answer_begins_behind_whole_blocks(tokenizer):
    encoder = EncoderSpec(num_layers=3, start_token_id=7)
    given = {"vocab_size": 8192, "context_tokens": 512, "now": 0.0, "encoder": encoder}
    for count in (1, 15, 16, 17):
        ids = list(range(20, 20 + count))
        request = make_request(Generate("r", prompt_ids=ids, sampling=SAMPLING), tokenizer, **given)
        assert request.prompt_ids[:count] == ids and set(request.prompt_ids[count:]) == {7}
        assert len(request.prompt_ids) % 16 == 1 and request.encoder_end == len(request.prompt_ids) - 1
        assert request.num_prompt_tokens == request.encoder_tokens == count
    make_request(Generate("r", prompt_ids=[1] * 495, sampling=SAMPLING), tokenizer, **given)
    with pytest.raises(RequestError, match="496 tokens but the context holds 496"):
        make_request(Generate("r", prompt_ids=[1] * 496, sampling=SAMPLING), tokenizer, **given)


def test_the_next_coordinator_is_told_all_that_clients_were_told(tokenizer):
    ids = tokenizer.encode("Once upon a time there was a lighthouse.")
    home = home_of(tokenizer, output_ids=ids[:3])
    assert home.resume((), 512, 0.0) is None
    for token_id in ids[3:6]:
        home.request.output_ids.append(token_id)
        home.take(Output("r", token_id, None, None))
    told_so_far = home.still_running()
    assert (told_so_far.request_id, told_so_far.prompt, told_so_far.ended) == ("r", "Once", None)
    assert told_so_far.output_ids == ids[:6] and told_so_far.sampling == home.asked.sampling
    assert tokenizer.decode(ids).startswith(told_so_far.text) and told_so_far.text
    for token_id in ids[6:]:
        home.request.output_ids.append(token_id)
        ended = Ended(home.request, "length", "", 1.0) if token_id == ids[-1] else None
        home.take(Output("r", token_id, None, ended))
    whole = home.still_running()
    assert whole.output_ids == ids and whole.text == tokenizer.decode(ids)
    assert isinstance(whole.ended, Finished) and whole.ended.completion_tokens == len(ids)


def test_a_request_that_is_only_prefilled_ends_here_or_goes_on_elsewhere(tokenizer):
    for goes_on in (True, False):
        request = Request("r", [5, 6, 7], SamplingParams(max_tokens=1), 0.0)
        request.output_ids.append(9)
        home = HomeRequest(
            request, AnswerStream(tokenizer.stream(), ()), "worker", goes_on=lambda it=goes_on: it
        )
        account = Account(np.array([[2.0, 1.0], [8.0, 4.0]]), ["worker", "lender"])
        ended = Ended(request, "length", "", 1.0, account=account)
        (tokens, last), _ = home.take(Output("r", 9, None, ended))
        assert tokens.token_ids == [9]
        assert isinstance(last, Prefilled if goes_on else Finished)
        if goes_on:
            assert last.served.hosts == ["worker", "lender"]
            back = account_of(last.served)
            assert (back.served == account.served).all() and back.weight_here == 2.0


@pytest.mark.parametrize(
    "served",
    [
        Served(),
        Served(["a"], [[1.0]]),
        Served(["a"], [[1.0, 2.0], [1.0, 2.0]]),
        Served(["a"], [[float("nan")], [1.0]]),
    ],
)
def test_costs_that_make_no_sense_are_left_off_the_bill(served):
    assert account_of(served) is None


@pytest.mark.parametrize(
    ("output_ids", "changes", "reason"),
    [
        ([5], {}, None),
        ([2], {}, "stop"),
        ([2], {"ignore_eos": True}, None),
        ([7], {"stop_token_ids": (7,)}, "stop"),
        ([5], {"max_tokens": 1}, "length"),
    ],
)
def test_what_ends_an_answer_is_known_without_an_engine(output_ids, changes, reason):
    params = SamplingParams(**({"max_tokens": 8} | changes))
    limits = {"eos_ids": (2,), "context_tokens": 100}
    assert ended_by(output_ids, params, num_tokens=4, **limits) == reason
    assert ended_by([5], SamplingParams(), num_tokens=100, **limits) == "length"
