"""How the tiny model reads a conversation: ChatML, with tool calls as Hermes writes them. It knows no tokenizer.

The text of a conversation is a prefix of the text of every longer one: nothing said before is ever rewritten.
"""

CHAT_TEMPLATE = r"""
{#- Tool definitions are not printed: the model knows its one tool by training, and short prompts keep it fast. -#}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set arguments = call.function.arguments -%}
        {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
        {{- arguments if arguments is string else arguments | tojson -}}
        {{- '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()
