"""Cosines: worked out by hand, and of a model's vectors, which are made once."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.errors import UserError
from panjue.prompts.similarity import Embedded, best_pairs, ngrams, similarity

TEXTS = st.lists(st.text("甲乙ab ", max_size=6), min_size=1, max_size=5)


@given(TEXTS, TEXTS)
def test_cosines_are_symmetric_and_of_equal_texts_one(texts: list[str], others: list[str]) -> None:
    table = ngrams(texts, others)
    assert table.shape == (len(texts), len(others))
    assert np.allclose(table, ngrams(others, texts).T)
    assert ((table >= 0) & (table <= 1 + 1e-9)).all()
    assert np.allclose(np.diagonal(ngrams(texts, texts)), 1.0)
    # One pair of texts has the same cosine in any company.
    assert np.isclose(ngrams(texts[:1], others[:1])[0, 0], table[0, 0])


def test_cosines_by_hand() -> None:
    # ab: a b ab. abc: a b c ab bc. aab: a twice, b, aa, ab.
    table = ngrams(["ab", ""], ["abc", "aab", "", "丙"])
    first = [3 / np.sqrt(3 * 5), (2 + 1 + 1) / np.sqrt(3 * 7), 0.0, 0.0]
    assert np.allclose(table, [first, [0.0, 0.0, 1.0, 0.0]])


def test_a_text_is_embedded_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def embed(texts: list[str]) -> np.ndarray:
        asked.extend(texts)
        return np.array([[len(text), text.count("a")] for text in texts], dtype=float)

    kept = tmp_path / "vectors.sqlite"
    for again in range(2):
        cosines = Embedded(embed, kept, "m")(["aa", "bbb"], ["aa", ""])
        assert np.allclose(cosines, [[1.0, 0.0], [1 / np.sqrt(2), 0.0]]), again
        assert asked == ["aa", "bbb"]
    Embedded(embed, kept, "another")(["aa"], ["aa"])
    assert asked == ["aa", "bbb", "aa"]


class Handler(BaseHTTPRequestHandler):
    """An embeddings endpoint: how often a text has a, b and c; its rows come in another order."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.path == "/v1/embeddings" and asked["model"] == "abc"
        data = [
            {"index": i, "embedding": [text.count(letter) for letter in "abc"]}
            for i, text in enumerate(asked["input"])
        ]
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": data[::-1]}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(serving: Callable[[ThreadingHTTPServer], None]) -> str:
    serving(server := ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    return f"http://127.0.0.1:{server.server_port}/v1"


def test_an_endpoint_embeds(endpoint: str) -> None:
    cosines = similarity(f"{endpoint}#abc")(["aab"], ["a", "c", "baa"])
    assert np.allclose(cosines, [[2 / np.sqrt(5), 0.0, 1.0]])
    with pytest.raises(UserError, match="404"):
        similarity(f"{endpoint}#other")(["a"], ["b"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("http://u:pw@x/v1#m", "no password goes into an address"),
        ("words", "neither ngrams, nor a folder, nor URL#MODEL"),
        ("http://x/v1", "say which model"),
    ],
)
def test_what_is_no_similarity_is_named(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        similarity(name)


def test_the_best_matching_is_not_the_first_come() -> None:
    points = np.array([[2.0, 1.9], [1.9, 0.0]])
    assert sorted(best_pairs(points)) == [(0, 1), (1, 0)]  # 3.8, and not 2.0
