"""The OpenAI API in front of a running cluster, asked by OpenAI's own client."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.clusters import LocalCluster, wait_for, write_topology
from tests.support.gateways import RunningGateway

PROMPT = "The harbour master wrote in his book"
MODEL = "edge-moe-demo"


@pytest.fixture(scope="module")
def gateway(one_node: LocalCluster) -> Iterator[RunningGateway]:
    running = RunningGateway(one_node)
    yield running
    running.close()


def test_a_completion_is_what_submit_answers(gateway: RunningGateway, one_node: LocalCluster) -> None:
    expected = one_node.answer(PROMPT, "--max-tokens", "24")
    done = gateway.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    assert done.choices[0].text == expected["text"]
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None and done.usage.completion_tokens == 24
    assert done.model_extra is not None
    assert done.model_extra["edge_runtime"][0]["bill"]["exact_here"] == pytest.approx(1.0)


def test_a_streamed_chat_is_the_whole_one_in_pieces(gateway: RunningGateway) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How do I list files?"}],
        "max_completion_tokens": 24,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = gateway.client.chat.completions.create(**ask)
    chunks = list(
        gateway.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[0].delta.role == "assistant"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    told = [entry.token for piece in pieces if piece.logprobs for entry in piece.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    assert told == [entry.token for entry in whole.choices[0].logprobs.content or ()]


def test_choices_and_prompts_are_answered_in_their_order(gateway: RunningGateway) -> None:
    done = gateway.client.completions.create(
        model=MODEL, prompt=[PROMPT, "Once upon a time"], n=2, seed=3, max_tokens=8, temperature=0.9
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    again = gateway.client.completions.create(
        model=MODEL, prompt="Once upon a time", seed=4, max_tokens=8, temperature=0.9
    )
    assert done.choices[3].text == again.choices[0].text


def test_many_clients_at_once_get_what_each_would_alone(gateway: RunningGateway) -> None:
    prompts = [f"{PROMPT} number {i}" for i in range(24)]

    def text_of(prompt: str) -> str:
        done = gateway.client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
        return done.choices[0].text

    together: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda prompt=prompt: together.update({prompt: text_of(prompt)}))  # type: ignore[misc]
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {prompt: text_of(prompt) for prompt in prompts}


def test_a_reader_that_goes_away_takes_its_request_along(
    gateway: RunningGateway, one_node: LocalCluster
) -> None:
    stream = gateway.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=450,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    one_node.wait_until_idle()
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 450, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as gone:
        gone.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        wait_for(lambda: one_node.status()["requests"]["in_flight"], "the request runs")
    one_node.wait_until_idle()


def test_models_and_health_are_told(gateway: RunningGateway) -> None:
    assert [model.id for model in gateway.client.models.list()] == [MODEL]
    assert gateway.client.models.retrieve(MODEL).id == MODEL
    assert gateway.get("/health") == (200, {"ready": True, "state": "ready"})


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", b"{", 400, "not JSON"),
        ("/v1/completions", b"[" * 100_000, 400, "nested too deeply"),
        ("/v1/completions", b'{"seed": ' + b"1" * 5000 + b"}", 400, "a number has more than 4300 digits"),
        ("/v1/completions", b"\xff\xfe\x00", 400, "not JSON"),
        ("/v1/completions", b'{"prompt": ""}', 400, "the prompt is empty"),
        ("/v1/completions", b'{"prompt": [9999999]}', 400, "9999999"),
        ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
        ("/v1/completions", b'{"prompt": "x", "model": "other"}', 404, "model 'other' is not served"),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"a" * (3 << 20)), 413, "more than"),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"a " * 4000), 400, "context"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            400,
            "messages is not valid",
        ),
        ("/v1/nothing", b"{}", 404, "Not Found"),
    ],
)
def test_a_bad_request_is_told_in_one_sentence(
    gateway: RunningGateway, path: str, body: bytes, status: int, said: str
) -> None:
    found, reply = gateway.post(path, body)
    assert (found, said in reply["error"]["message"]) == (status, True), reply


def test_a_refusal_names_the_field(gateway: RunningGateway) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    long = "many words " * 400
    for options, field in (  # what only the home that is asked can tell names its field too
        ({"prompt": long}, "prompt"),
        ({"prompt": "x", "extra_body": {"k": 1.5}}, "k"),
        ({"prompt": "x", "extra_body": {"service": "cheap"}}, "service"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            gateway.client.completions.create(model=MODEL, **options)
        assert refused.value.param == field
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": long}])
    assert refused.value.param == "messages"


def test_a_key_is_needed_where_one_is_set(one_node: LocalCluster) -> None:
    key = "a-key-of-some-length"
    path = one_node.topology.parent / "api.key"
    path.write_text(key + "\n")
    guarded = RunningGateway(one_node, "--api-key-file", str(path), api_key=key)
    try:
        assert [model.id for model in guarded.client.models.list()] == [MODEL]
        with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
            guarded.client.with_options(api_key="another-key-of-some-length").models.list()
    finally:
        guarded.close()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--listen", "0.0.0.0:1"), "can be reached by other machines"),
        (("--listen", "here"), "expected host:port"),
        (("--listen", "127.0.0.1:99999"), "expected host:port"),
        (("--api-key-file", "absent.key"), "cannot be read"),
    ],
)
def test_an_address_or_key_that_cannot_be_is_refused(
    one_node: LocalCluster, flags: tuple[str, ...], said: str
) -> None:
    finished = one_node.cli("gateway", *flags)
    assert finished.exit_code == 2
    assert said in finished.stderr and "Traceback" not in finished.stderr


def test_without_a_cluster_a_request_is_told_to_try_again(tmp_path: Any) -> None:
    running = RunningGateway(LocalCluster(write_topology(tmp_path, "one_node")), "--wait", "0")
    try:
        assert running.get("/health") == (503, {"ready": False, "state": "waiting"})
        with pytest.raises(openai.InternalServerError) as failure:
            running.client.completions.create(model=MODEL, prompt=PROMPT)
        assert failure.value.status_code == 503
        assert failure.value.response.headers["retry-after"] == "2"
    finally:
        running.close()
