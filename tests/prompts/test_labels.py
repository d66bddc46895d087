from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.labels import collect, load_labels
from panjue.prompts.plumbing.errors import UserError

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
LISTS = st.lists(NAMES, max_size=4)
ANSWERS = st.lists(st.builds(lambda a, b: {"charges": a, "articles": b}, LISTS, LISTS))


@given(ANSWERS)
def test_saved_labels_come_back(
    tmp_path_factory: pytest.TempPathFactory, answers: list[dict[str, list[str]]]
) -> None:
    folder = tmp_path_factory.mktemp("labels")
    labels = collect(answers)
    labels.save(folder)
    again = load_labels(folder / "labels.json")
    assert again == labels
    before = (folder / "labels.json").read_bytes()
    again.save(folder / "again")
    saved = (folder / "again/labels.json").read_bytes()
    assert saved == before, "the order, which is a ranking, too"


def test_counts_by_hand() -> None:
    labels = collect(
        [
            {"charges": ["诈骗罪"], "articles": ["266"], "penalty": ["8"]},
            {"charges": ["盗窃罪", "诈骗罪"], "articles": ["264", "266", "65"], "penalty": ["10"]},
            {"charges": ["盗窃罪", "盗窃罪"], "articles": ["264"], "penalty": ["10"]},
            {"charges": [], "articles": ["264"], "penalty": ["14"]},
        ]
    )
    assert labels.counts == {
        "charges": {"盗窃罪": 2, "诈骗罪": 2},
        "articles": {"264": 3, "266": 2, "65": 1},
        "penalty": {"10": 2, "14": 1, "8": 1},
    }
    assert labels.most == {"charges": 2, "articles": 3, "penalty": 1}
    assert labels.pairs == {
        "盗窃罪": {"264": 2, "266": 1, "65": 1},
        "诈骗罪": {"266": 2, "264": 1, "65": 1},
    }
    assert labels.names("articles") == ["264", "266", "65"]
    assert labels.normal_forms["charges"] == {"盗窃": "盗窃罪", "诈骗": "诈骗罪"}
    assert labels.commonest("articles") == "264"
    assert labels.commonest("pages") is None
    assert next(iter(labels.pairs["诈骗罪"])) == "266", "the commonest first"


@pytest.mark.parametrize("content", ['{"charges": []}', '{"most": {"a": "b"}}', "[1]", ""])
def test_another_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "labels.json").write_text(content, "utf-8")
    with pytest.raises(UserError, match=r"labels\.json: not "):
        load_labels(tmp_path / "labels.json")
