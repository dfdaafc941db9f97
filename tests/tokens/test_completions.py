"""Plain completions in the forest:

- one that begins with a recorded prompt and answer continues it, also ids after text and text after ids; that the two
  continue their own kind, with the tokens that were sampled, is shown by tests/gateway/test_completions.py
- an answer that ended by itself may be continued before and after its end token
- the longest recorded prefix counts
- the same prompt again is `repeated`, another beginning is `new_conversation`, a second continuation `edited`
- the identity is that of the prompt
"""

from areal_agent.tokens.forest import Forest, Prompt, Reply
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ForkReason

from .conftest import parent_of


def answer(forest: Forest, prompt: Prompt, name: str, *token_ids: int) -> ForkReason | None:
    message = {"role": "assistant", "content": ""}
    return forest.record(prompt, [Reply(completion_id=name, token_ids=token_ids, message=message)])


def test_ids_continue_text_and_text_continues_ids(renderer: Renderer) -> None:
    forest = Forest(renderer)
    first = forest.plan_completion("the fox")
    answer(forest, first, "c1", 20, 21)
    prompt = forest.plan_completion([*first.new_ids, 20, 21, 22])
    assert (parent_of(prompt), tuple(prompt.new_ids)) == ("c1", (22,))
    given = forest.plan_completion(renderer.ids_of("lazy"))
    answer(forest, given, "c2", *renderer.ids_of(" dog"))
    assert parent_of(forest.plan_completion("lazy dog!")) == "c2"


def test_an_ended_answer_may_be_continued_before_and_behind_its_end(renderer: Renderer) -> None:
    forest, end = Forest(renderer), renderer.end_token_id
    first = forest.plan_completion("the fox")
    answer(forest, first, "c1", 20, end)
    before = forest.plan_completion([*first.new_ids, 20, 21])
    assert (before.fork_at, tuple(before.new_ids)) == (first.num_tokens + 1, (21,))
    behind = forest.plan_completion([*first.new_ids, 20, end, 21])
    assert (behind.fork_at, tuple(behind.new_ids)) == (first.num_tokens + 2, (21,))
    text = "the fox" + renderer.text_of((20,), has_ended=False)
    assert forest.plan_completion(text + " x").fork_at == first.num_tokens + 1
    assert forest.plan_completion(text + "<|im_end|>x").fork_at == first.num_tokens + 2


def test_the_longest_beginning_counts(renderer: Renderer) -> None:
    forest = Forest(renderer)
    answer(forest, forest.plan_completion([1, 2]), "c1", 3)
    answer(forest, forest.plan_completion([1, 2, 3, 4]), "c2", 5)
    assert parent_of(forest.plan_completion([1, 2, 3, 4, 5, 6])) == "c2"
    assert parent_of(forest.plan_completion([1, 2, 3, 9])) == "c1"


def test_fork_reasons(renderer: Renderer) -> None:
    forest = Forest(renderer)
    assert answer(forest, forest.plan_completion("a"), "c1", 20) is None
    assert answer(forest, forest.plan_completion("a"), "c2", 21) is ForkReason.REPEATED
    assert answer(forest, forest.plan_completion("b"), "c3", 22) is ForkReason.NEW_CONVERSATION
    ids = renderer.ids_of("b")
    assert answer(forest, forest.plan_completion([*ids, 22, 23]), "c4", 24) is None
    assert answer(forest, forest.plan_completion([*ids, 22, 25]), "c5", 26) is ForkReason.EDITED


def test_identity_is_that_of_the_prompt(renderer: Renderer) -> None:
    forest = Forest(renderer)
    assert forest.plan_completion("a").identity == Forest(renderer).plan_completion("a").identity
    assert len({forest.plan_completion(prompt).identity for prompt in ("a", "b", [1], [2])}) == 4
