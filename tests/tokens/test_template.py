"""A chat template renders as transformers renders it; test_template_conformance.py has the model families:

- `bos_token`, `raise_exception`, `tojson` with its options, `break`, `generation` blocks, attributes that are missing
- templates that reach outside the sandbox, and texts that are not Jinja, are refused
"""

import pytest
from transformers import PreTrainedTokenizerFast

from areal_agent.errors import ConfigError, RequestError
from areal_agent.tokens.template import ChatTemplate

MESSAGES = [
    {"role": "user", "content": "é <b>"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "x"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}]

SNIPPETS = [
    "{{ bos_token }}{{ eos_token }}",
    "{{ tools | tojson(indent=2) }}{{ messages[0] | tojson(ensure_ascii=true) }}{{ tools | tojson }}",
    "{{ tools | tojson(indent=0) }}{{ tools | tojson(sort_keys=true) }}{{ tools | tojson(separators=(',', ':')) }}",
    "{% for m in messages %}{{ {'a': m} | tojson }}{{ m | tojson }}{{ m | tojson(indent=1) }}{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.index0 }}{{ m.content }}{% endfor %}",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}",
    "{{ messages[0].name is defined }}{{ messages[0].items() | list | length }}{{ messages[0]['role'] }}",
    "{% for m in messages %}\n  {% if m.tool_calls %}\n x\n  {% endif %}\n{{ m.content }}\n{% endfor %}\n",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
]


@pytest.mark.parametrize("source", SNIPPETS)
def test_snippets_render_as_in_transformers(tokenizer: PreTrainedTokenizerFast, source: str) -> None:
    special = {"bos_token": "<s>", **tokenizer.special_tokens_map}
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=TOOLS, chat_template=source, tokenize=False, bos_token="<s>"
    )
    assert ChatTemplate(source, special).render(MESSAGES, TOOLS, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_is_refused_is_the_requests_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.param == "messages"


def test_no_jinja_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="is not valid Jinja"):
        ChatTemplate("{% if %}", {})
