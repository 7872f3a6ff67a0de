"""The pretrained model's task: rewards by Python's own arithmetic."""

from benchmarks.learning import tasks
from benchmarks.pretrained import chat_task

END = "<|im_end|>"


def test_the_form_that_is_shown_is_right() -> None:
    for terms in (*chat_task.SHOWN, (7, 5, 8)):
        problem = tasks.Problem("chain", 1, chat_task.asked(terms), str(sum(terms)))
        answer = chat_task.answered(terms)
        assert all(eval(left) == eval(right) for left, right in map(sides, answer.split(", ")))
        assert chat_task.reward(END, problem, answer + END) == 1.0
        # The controls: cut off, another answer, the answer's beginning, more after it, nothing.
        assert chat_task.reward(END, problem, answer) == 0.0
        assert chat_task.reward(END, problem, answer + "1" + END) == 0.0
        assert chat_task.reward(END, problem, answer[:-1] + END) == 0.0
        assert chat_task.reward(END, problem, answer + " apples" + END) == 0.0
        assert chat_task.reward(END, problem, END) == 0.0


def sides(step: str) -> tuple[str, str]:
    left, _, right = step.partition(" = ")
    return left, right


def test_problems_are_sums_and_held_out_ones_are_never_trained_on() -> None:
    training = chat_task.draw_problems(400, "0 step 3")
    held_out = chat_task.draw_problems(400, "evaluation", held_out=True)
    assert not any(map(tasks.is_held_out, training))
    assert all(map(tasks.is_held_out, held_out))
    assert all(str(eval(p.prompt)) == p.answer for p in (*training, *held_out))
    shown = {chat_task.asked(terms) for terms in chat_task.SHOWN}
    assert not shown & {p.prompt for p in chat_task.draw_problems(20_000, "all")}
    assert chat_task.draw_problems(5, "0 step 3") == training[:5]
