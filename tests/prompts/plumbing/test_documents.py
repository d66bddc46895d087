"""A document is a list of items, or has one."""

from pathlib import Path

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import list_items


@pytest.mark.parametrize("key", [None, "data"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON: Expecting value"),
        (b"[1, 2", "not JSON: Expecting"),
        (b"[1]]", "not JSON: Extra data"),
        (b'[{"a": "b]', "not JSON: Unterminated string"),
        (b"[" * 100_000, "it is nested too deeply"),
        ('["中文"]'.encode("gb18030"), "not UTF-8"),
        (b"7", "no .*list"),
        (b'{"data": 3}', "no .*list"),
        (b'{"a": [1]}', "no .*list"),
    ],
)
def test_what_has_no_list_is_named(
    content: bytes, complaint: str, key: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.json: .*{complaint}"):
        list_items(path, key)
