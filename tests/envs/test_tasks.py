"""The questions of the calculator:

- no operand value of the test split occurs in the train split, nor in the demonstrations, in any seed
- both splits use every digit in every place
- a question, its Python and its answer agree; results have five digits
- the same seed gives the same tasks; another seed others; ids are unique
- the number of tasks; what is asked wrongly is refused
"""

import random
import re
from itertools import islice

import pytest

from envs.calculator.demonstrations import demonstrations
from envs.calculator.tasks import NUM_RESULT_DIGITS, NUM_TASKS, Split, draw_question, draw_text, is_held_out, load


def operands(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def question_of(task: dict) -> str:
    (message,) = task["messages"]
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize(("split", "held_out"), [("train", False), ("test", True)])
@pytest.mark.parametrize("seed", [0, 1])
def test_operand_values_belong_to_one_split(split: Split, held_out: bool, seed: int) -> None:
    for task in load(split, seed, 500):
        assert all(is_held_out(operand) is held_out for operand in operands(question_of(task)))


def test_demonstrations_use_no_held_out_operand() -> None:
    for conversation in islice(demonstrations(0), 500):
        assert not any(map(is_held_out, operands(conversation[0]["content"])))


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_digit_in_every_place(split: Split) -> None:
    numbers = {str(number) for task in load(split, 0, 1000) for number in operands(question_of(task))}
    for length in (2, 3):
        for place in range(length):
            digits = {number[place] for number in numbers if len(number) == length}
            assert digits == set("123456789" if place == 0 else "0123456789")


def test_about_one_value_in_five_is_held_out() -> None:
    assert 0.17 < sum(map(is_held_out, range(10, 1000))) / 990 < 0.23


def test_expression_and_answer_agree() -> None:
    rng = random.Random(0)
    for _ in range(200):
        question = draw_question(rng, "train")
        assert eval(question.expression) == question.answer


def test_results_have_five_digits() -> None:
    assert {len(task["answer"].lstrip("-")) for task in load("test", 0, 500)} == {NUM_RESULT_DIGITS}


def test_a_text_asks_for_its_expression() -> None:
    rng = random.Random(0)
    for _ in range(100):
        question = draw_question(rng, "test")
        text = draw_text(rng, question)
        for word, sign in (("plus", "+"), ("minus", "-"), ("times", "*")):
            text = text.replace(word, sign)
        assert question.expression in text


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert load("train", 3, 50) == load("train", 3, 50)
    assert load("train", 3, 50) != load("train", 4, 50)


def test_ids_are_unique() -> None:
    tasks = [*load("train", 0), *load("test", 0)]
    assert len({task["id"] for task in tasks}) == len(tasks) == sum(NUM_TASKS.values())


@pytest.mark.parametrize("num", [0, -1])
def test_too_few_tasks_are_refused(num: int) -> None:
    with pytest.raises(ValueError, match=f"num is {num}; give at least 1"):
        load("train", 0, num)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split is 'dev'; valid: 'train', 'test'"):
        load("dev", 0)  # type: ignore[arg-type]
