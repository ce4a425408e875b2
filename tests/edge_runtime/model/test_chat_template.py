"""What a template may do, and that today's date is a value."""

from datetime import datetime

import pytest

from edge_runtime.errors import RequestError
from edge_runtime.model.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_template_that_prints_a_date_prints_the_one_it_is_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", today=lambda: datetime(2024, 7, 26))
    assert template.render(MESSAGES) == "26 Jul 2024"


def test_blocks_leave_no_empty_lines():
    assert (
        ChatTemplate("{% for m in messages %}\n  {% if m %}\nx\n  {% endif %}\n{% endfor %}").render(MESSAGES)
        == "x\n"
    )


def test_variables_reach_the_template_and_unknown_ones_are_empty():
    assert ChatTemplate("{{ tools }}{{ nothing }}{{ n + 1 }}").render(MESSAGES, tools="t", n=1) == "t2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ ''.__class__.__bases__ }}",
        "{{ messages[0].role + 1 }}",
        "{{ messages[9].role.x }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].missing | tojson }}",
        "{{ strftime_now(3) }}",
    ],
)
def test_whatever_goes_wrong_inside_is_a_request_error(source):
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        ChatTemplate(source).render(MESSAGES)
