"""Answers constrained to a JSON schema, a regular expression or a grammar, with llguidance installed:

- every answer that ends is valid: JSON of the schema, a full match, or a sentence of the grammar, in any batch, over
  retractions for a pause or for lack of room, and over a swap of weights; other requests are unconstrained
- the recorded probability is the one that was sampled from
- an invalid grammar, or two at once, are refused and the engine goes on; an answer whose grammar becomes too complex
  is refused in the middle, and never looks complete
"""

import asyncio
import json
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.sampler import Grammars
from areal_agent.engine.embedded.workload import Row, Workload
from areal_agent.errors import EngineRejected
from areal_agent.types import FinishReason, PauseMode, TokenChunk, WeightVersion
from tests.engine.conftest import both_ways

fixed_shapes = both_ways

pytest.importorskip("llguidance")

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["sum", "product"]}, "is_done": {"type": "boolean"}},
        "required": ["kind", "is_done"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
END = 256


@pytest.fixture(scope="module")
def spelling(make_model):
    """A model whose tokens are bytes and one end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder = make_model(seed=5, vocab_size=264, eos_token_id=END)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, tokenizer


async def test_answers_are_json_of_the_schema(spelling, serve, ask):
    folder, tokenizer = spelling
    async with serve(folder) as served:
        assert (await served.engine.info()).has_grammar
        held = [ask(number, json_schema=SCHEMA, max_tokens=80) for number in range(4)]
        free = ask(9, max_tokens=30)
        alone = await served.engine.generate(free)
        *answers, beside = await asyncio.gather(*(served.engine.generate(one) for one in [*held, free]))
    for answer in answers:
        assert answer.finish_reason is FinishReason.STOP and answer.token_ids[-1] == END
        said = json.loads(tokenizer.decode(list(answer.token_ids[:-1])))
        assert said["kind"] in ("sum", "product") and isinstance(said["is_done"], bool)
        forced = sum(logprob == 0.0 for logprob in answer.logprobs)
        assert forced > 20, "where one token is allowed, its probability is 1"
    assert beside.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("held", "pattern"),
    [
        ({"regex": "(ab|cd){2,5} [0-9]{3}"}, "(ab|cd){2,5} [0-9]{3}"),
        ({"ebnf": 'root ::= "x" digit+ "=" ("yes" | "no")\ndigit ::= [0-3]'}, "x[0-3]+=(yes|no)"),
    ],
)
async def test_answers_follow_the_expression_or_grammar(held, pattern, spelling, serve, ask):
    folder, tokenizer = spelling
    async with serve(folder) as served:
        answers = await asyncio.gather(
            *(served.engine.generate(ask(number, **held, max_tokens=300)) for number in range(6))
        )
    ended = [answer for answer in answers if answer.finish_reason is FinishReason.STOP]
    assert ended
    for answer in ended:
        assert re.fullmatch(pattern, tokenizer.decode(list(answer.token_ids[:-1])))


WRONG = [
    *(("json_schema", text) for text in ('{"type": 5}', "nonsense", '{"$ref": "#/nope"}')),
    *(("regex", text) for text in ("(a", "(?=a)b")),
    *(("ebnf", text) for text in ("root ::= (", "root ::= missing", "")),
]


async def test_what_cannot_be_followed_is_refused(spelling, serve, ask):
    async with serve(spelling[0]) as served:
        for kind, text in WRONG:
            with pytest.raises(EngineRejected, match=f"{kind} cannot be followed"):
                await served.engine.generate(ask(1, **{kind: text}))
            with pytest.raises(EngineRejected, match="an answer is held to one of"):
                await served.engine.generate(
                    ask(1, **({"json_schema": "{}", "regex": "a", "ebnf": "b"} | {kind: text}))
                )
        assert (await served.engine.generate(ask(2, max_tokens=3))).token_ids


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE, None])
async def test_a_swap_of_weights_goes_on_in_the_grammar(mode, spelling, make_model, serve, share, ask):
    folder, tokenizer = spelling
    others = share(make_model(seed=6, vocab_size=264, eos_token_id=END))
    async with serve(folder) as served:
        answer = await served.under_way(ask(1, json_schema=SCHEMA, max_tokens=80), num_steps=8)
        if mode is not None:
            await served.gate.meanwhile(served.engine.pause(mode))
        await served.gate.meanwhile(served.engine.update_weights(others, WeightVersion(step=8)))
        served.gate.open()
        await served.engine.resume()
        result = await answer
    assert [span.version.step for span in result.versions] == [7, 8]
    assert result.finish_reason is FinishReason.STOP
    assert set(json.loads(tokenizer.decode(list(result.token_ids[:-1])))) == {"kind", "is_done"}


def test_rows_without_room_are_retracted_and_stay_in_the_grammar(spelling, ask):
    folder, tokenizer = spelling
    grammars = Grammars.of(folder, vocab_size=264, eos_token_ids={END})
    assert grammars is not None
    pattern = "(ab|cd){20,25}"
    answers: list[list[tuple[int, ...]]] = []
    for kv_tokens in (None, 128):
        runner = ModelRunner(str(folder), device="cpu", num_slots=4, max_context_tokens=128, kv_tokens=kv_tokens)
        work = Workload(runner, WeightVersion())
        requests = [ask(number, regex=pattern, max_tokens=80) for number in range(6)]
        rows = [Row(request=request, matcher=grammars.matcher("regex", pattern)) for request in requests]
        for row in rows:
            work.add(row)
        while work.has_work():
            work.step()
        assert (work.counts.retracted_requests > 0) == (kv_tokens is not None)
        answers.append([row.answer.result().token_ids for row in rows])
    assert answers[0] == answers[1]
    for token_ids in answers[1]:
        assert re.fullmatch(pattern, tokenizer.decode(list(token_ids[:-1])))


def test_a_tokenizer_that_is_missing_or_cannot_be_read_is_no_grammar_and_no_failure(tmp_path):
    assert Grammars.of(tmp_path, vocab_size=10, eos_token_ids={1}) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Grammars.of(tmp_path, vocab_size=10, eos_token_ids={1}) is None


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_becomes_too_much_in_the_middle_is_refused_there(is_streamed, spelling, serve, ask):
    chunks: list[TokenChunk] = []
    async with serve(spelling[0]) as served:
        request = ask(1, regex="((a{1,500}){1,500}){1,500}", logit_bias=((END, -1e6),), max_tokens=400)
        with pytest.raises(EngineRejected, match="the grammar cannot be followed"):
            await served.engine.generate(request, chunks.append if is_streamed else None)
        assert bool(chunks) == is_streamed, "it began well"
        assert (await served.engine.generate(ask(2, max_tokens=3))).token_ids
        assert (await served.engine.stats()).num_running == 0


def test_where_nothing_can_follow_the_answer_ends(spelling):
    grammars = Grammars.of(spelling[0], vocab_size=264, eos_token_ids={END})
    assert grammars is not None
    matcher = grammars.matcher("json_schema", '{"const": 7}')
    matcher.follow(sorted(pre_tokenizers.ByteLevel.alphabet()).index("x"))
    assert matcher.allowed().nonzero()[0].tolist() == [END]
