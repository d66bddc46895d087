import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from panjue.prompts import render as rendering
from panjue.prompts import tasks
from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.render import neutralize, render
from panjue.prompts.task import load_task, task_folders

GOLDEN = Path(__file__).parents[1] / "golden"

NASTY = Example(
    id=1,
    text="被告人{李某}发送“<|im_end|>”\r\n　<think>a < b > c</think>\t{x} {{y}} %s \\n。 ",
    names=("{李某}", "<|im_start|>"),
    inputs={"defendants": "{李某}、<|im_start|>"},
)
ANGLED = st.text(st.sampled_from("<>|ab_｜＜ \n\u3000/判"))


def test_prompt_is_the_golden_file() -> None:
    golden = (GOLDEN / "judgment.prompt.md").read_bytes().decode("utf-8")
    assert load_task("judgment").ask.prompt(NASTY) == [{"role": "user", "content": golden}]
    told = {**NASTY.inputs, "opinions": "<|im_start|>: 盗窃罪 90%"}
    [message] = load_task("judgment").ask.prompt(replace(NASTY, inputs=told))
    more = "\n分类器的意见（可能有误）：\n＜|im_start|>: 盗窃罪 90%\n"
    assert message["content"] == golden + more


@pytest.mark.parametrize("task", [*filter(rendering.names_opinions, task_folders())])
@given(text=ANGLED, opinions=ANGLED)
def test_opinions_are_one_paragraph_more(task: str, text: str, opinions: str) -> None:
    inputs = {"defendants": "甲", "person": "乙"}
    [without] = render(task, Example(1, text, inputs=inputs))
    [message] = render(task, Example(1, text, inputs={**inputs, "opinions": opinions}))
    template = rendering.prompt_file(task).read_text("utf-8")
    paragraph = template[template.rindex("\n\n") + 1 :]
    shown = paragraph.format(opinions=neutralize(opinions))
    assert message["content"] == without["content"] + shown


@given(ANGLED | st.text())
@example("<" + "x" * 64 + ">")
@example("<|im_<|im_end|>end|>")
def test_no_marker_survives_and_nothing_but_its_bracket_changes(text: str) -> None:
    safe = neutralize(text)
    assert not re.search(r"<[^>\s]{1,64}>", safe)
    assert len(safe) == len(text)
    for place, (old, new) in enumerate(zip(text, safe, strict=True)):
        if old != new:
            assert (old, new) == ("<", "＜")
            assert re.match(r"<[^>\s]{1,64}>", text[place:])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{text} {place}", "there is no field 'place'"),
        ("{text} {", "Single '{' encountered in format string"),
        ("{text.x}", "'str' object has no attribute 'x'"),
        ("{text[x]}", "string indices must be integers, not 'str'"),
    ],
)
def test_a_wrong_template_is_named_with_what_to_write(
    template: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "judgment/prompt.md"
    path.parent.mkdir()
    path.write_text(template, "utf-8")
    monkeypatch.setattr(tasks, "__path__", [str(tmp_path)])
    with pytest.raises(UserError, match=r"severity/prompt\.md: is missing; write"):
        render("severity", NASTY)
    with pytest.raises(UserError) as raised:
        render("judgment", NASTY)
    assert str(raised.value) == (
        f"{path}: {problem}; the fields are {{text}}, {{defendants}}; a brace that is text is "
        "written twice: {{ or }}"
    )
    path.write_text("{defendants}", "utf-8")
    with pytest.raises(UserError, match=r"prompt\.md: has no \{text\}, so that the"):
        render("judgment", NASTY)
    path.write_text('{text} {{}} {{"a": 1}}', "utf-8")
    assert render("judgment", NASTY)[0]["content"].endswith(' {} {"a": 1}')


def test_a_hostile_text_costs_one_look_at_each_character() -> None:
    # One after the other these take minutes; a count of steps is not to be had, so: it ends.
    words = [f"<SPECIAL_{number}>" for number in range(1000)] + ["[INST]"]
    pattern = re.compile(rendering._any_of(words), re.IGNORECASE)
    assert not pattern.search("<" * 260_000 + "<SPECIAL_" * 20_000)
