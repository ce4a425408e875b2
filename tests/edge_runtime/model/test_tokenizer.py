"""Text to ids as AutoTokenizer has it, chats by the model's template, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import CheckpointError, RequestError
from edge_runtime.model.tokenizer import Tokenizer
from tests.support.tiny_models import quiet_transformers

TEXTS = [
    "Die Funktion gibt",
    " ",
    "\n\n\t x",
    "def f(x):\n    return x ** 2  # square",
    "SELECT * FROM t WHERE a >= 3;",
    "na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d \u2026",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u305d\u3057\u3066\u4e2d\u6587\u3002",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "emoji \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3f3\ufe0f\u200d\U0001f308 end",
    "<|im_start|>user\nhi<|im_end|>",
    "<|bos|>twice",
    "<|unknown|> {{ x }}",
    "\x00\x01\x7f",
    "e\u0301 vs \u00e9",
    "a" * 2000,
]


@pytest.fixture(scope="module")
def tokenizer(demo_model) -> Tokenizer:
    return Tokenizer.open(demo_model)


@pytest.fixture(scope="module")
def reference(demo_model):
    from transformers import AutoTokenizer

    with quiet_transformers():
        return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture
def folder(demo_model, tmp_path) -> Path:
    for path in demo_model.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reference_of(folder: Path):
    from transformers import AutoTokenizer

    with quiet_transformers():
        return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_raw_text_is_tokenised_as_auto_tokenizer_does(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference(text)["input_ids"]


@given(
    st.text(min_size=1, max_size=200).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
)
def test_any_text_is_tokenised_as_auto_tokenizer_does(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "\u65e5\u672c \U0001f600"},
        ],
        [{"role": "assistant", "content": "I go first"}],
        [{"role": "user", "content": ""}],
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_are_tokenised_as_auto_tokenizer_does(tokenizer, reference, messages, add_generation_prompt):
    ids = tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert ids == expected
    assert ids.count(1) == 1 and ids[0] == 1, "one bos, though the template writes it and encode would add it"


def test_ids_that_end_an_answer_come_from_the_generation_config(tokenizer, folder):
    assert tokenizer.eos_token_ids == {2, 4}
    edit(folder / "generation_config.json", eos_token_id=7)
    edit(
        folder / "config.json", eos_token_id=["x"]
    )  # which nobody reads beside a generation config, here and elsewhere
    assert Tokenizer.open(folder).eos_token_ids == {7}
    edit(folder / "config.json", eos_token_id=2)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.open(folder).eos_token_ids == {2}
    edit(folder / "config.json", eos_token_id=None)
    assert Tokenizer.open(folder).eos_token_ids == frozenset()
    edit(folder / "config.json", eos_token_id=["x"])
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer.open(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|brand_new|>"]},
        {"bos_token": {"__type": "AddedToken", "content": "<|bos|>", "special": True}},
    ],
)
def test_settings_of_the_tokenizer_config_have_the_same_effect_as_in_transformers(folder, changes):
    edit(folder / "tokenizer_config.json", **changes)
    ours, theirs = Tokenizer.open(folder), reference_of(folder)
    for text in [*TEXTS, "a <|brand_new|> b"]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_left_in_the_file_have_no_effect(folder):
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    edit(folder / "tokenizer.json", truncation=truncation, padding=padding)
    text = "one two three four five six"
    ids = Tokenizer.open(folder).encode(text)
    assert len(ids) > 4 and 0 not in ids and ids == reference_of(folder)(text)["input_ids"]


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(RequestError, match="the prompt is empty"):
        tokenizer.encode("")
    with pytest.raises(RequestError, match="list of messages is empty"):
        tokenizer.encode_chat([])


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("broken \ud83d emoji")


@pytest.mark.parametrize("message", ["hi", {}, {"role": 3, "content": "x"}, None])
def test_a_message_without_a_role_is_refused_by_its_index(tokenizer, message):
    with pytest.raises(RequestError, match="message 1 must be an object with a role"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}, message])


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": 3}])
def test_a_message_that_the_template_chokes_on_is_the_users_fault(tokenizer, message):
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        tokenizer.encode_chat([message])


def test_a_refusal_of_the_template_reaches_the_user_in_its_own_words(folder):
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(RequestError, match="roles must alternate user/assistant"):
        Tokenizer.open(folder).encode_chat([{"role": "assistant", "content": "x"}])


def test_a_template_cannot_reach_out_of_its_sandbox(folder):
    edit(
        folder / "tokenizer_config.json", chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(RequestError, match="unsafe"):
        Tokenizer.open(folder).encode_chat([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_says_so_when_asked_to_chat(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    tokenizer = Tokenizer.open(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


TRICKY = (
    "{%- set ns = namespace(n=0) %}\n"
    "{%- for m in messages %}\n"
    "    {%- if loop.index > 3 %}{% break %}{% endif %}\n"
    "    {% generation %}{{ bos_token }}{{ m.content | tojson }}{% endgeneration %}\n"
    "{% endfor %}{{ tools is none }}{{ eos_token }}"
)


@pytest.mark.parametrize("place", ["config", "file", "list"])
def test_templates_have_the_names_tags_and_filters_that_transformers_gives_them(folder, place):
    if place == "file":
        (folder / "chat_template.jinja").write_text(TRICKY)
    else:
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TRICKY}]
        edit(folder / "tokenizer_config.json", chat_template=TRICKY if place == "config" else named)
    messages = [{"role": "user", "content": f"<b>&\u00e9 {i}"} for i in range(5)]
    expected = reference_of(folder).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.open(folder).render_chat(messages) == expected
    assert '"<b>&\u00e9 2"' in expected and "\u00e9 3" not in expected


def test_a_template_that_does_not_compile_is_told(folder):
    edit(folder / "tokenizer_config.json", chat_template="{% for %}")
    with pytest.raises(RequestError, match="cannot be compiled"):
        Tokenizer.open(folder).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not JSON that can be read"), ("{}", "not a tokenizer")]
)
def test_a_damaged_tokenizer_file_is_named(folder, content, words):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.open(folder)


def test_a_folder_without_a_tokenizer_is_named(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.open(folder)


def test_the_content_hash_tells_tokenizers_apart(tokenizer, folder):
    assert Tokenizer.open(folder).content_hash == tokenizer.content_hash
    edit(folder / "tokenizer.json", version="1.1")
    content = (folder / "tokenizer.json").read_text().replace('"1.1"', '"1.0"')
    (folder / "tokenizer.json").write_text(content)
    assert Tokenizer.open(folder).content_hash != tokenizer.content_hash


def test_tokenizing_needs_no_torch(demo_model, repository):
    script = (
        "import sys; from edge_runtime.model.tokenizer import Tokenizer; "
        f"Tokenizer.open({str(demo_model)!r}).encode('x'); print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"
