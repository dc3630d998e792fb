"""PromQL read well enough to say what an expression asks for: which metrics, with which labels, grouped by which.

    >>> Query('sum by (le) (rate(x_bucket{tier="gpu"}[5m]))').selectors
    [Selector(metric='x_bucket', matchers=(('tier', '=', 'gpu'),), function='rate')]

Knows the grammar's tokens alone; whether an expression makes sense is Prometheus' business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<range>\[[^\]]*\])
    |(?P<number>\d[\w.]*)
    |(?P<word>[a-zA-Z_:][\w:]*)
    |(?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},@]))""",
    re.VERBOSE,
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_OTHER_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


@dataclass(frozen=True)
class Selector:
    """A metric with its label matchers (label, operator, value), and the function that it is the argument of."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    function: str


@dataclass
class Query:
    """A parsed expression. `grouping`: the labels in by, without, on and the like."""

    text: str
    selectors: list[Selector] = field(default_factory=list)
    grouping: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = list(_tokens(self.text))
        at = 0
        while at < len(self._tokens):
            at = self._read(at)

    def _read(self, at: int) -> int:
        """Take in what begins with token `at`; returns where the next begins."""
        kind, word = self._tokens[at]
        follows = self._tokens[at + 1][1] if at + 1 < len(self._tokens) else ""
        if kind != "word" or word.lower() in _OTHER_WORDS:
            return at + 1
        if word in _GROUPING:
            if follows != "(":
                return at + 1
            end = self._index(")", at)
            self.grouping += [text for kind, text in self._tokens[at:end] if kind == "word"][1:]
            return end + 1
        if follows == "(" or follows in _GROUPING:
            return at + 1
        function = self._tokens[at - 2][1] if at > 1 and self._tokens[at - 1][1] == "(" else ""
        end = self._index("}", at) if follows == "{" else at
        texts = [text for _, text in self._tokens[at + 2 : end] if text != ","]
        matchers = tuple(zip(texts[0::3], texts[1::3], (value[1:-1] for value in texts[2::3]), strict=True))
        self.selectors.append(Selector(word, matchers, function))
        return end + 1

    def _index(self, text: str, after: int) -> int:
        return next(i for i in range(after, len(self._tokens)) if self._tokens[i][1] == text)


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"no PromQL at {text[at : at + 20]!r} of {text!r}")
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found
