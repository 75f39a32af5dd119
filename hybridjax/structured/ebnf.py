"""EBNF as llama.cpp, XGrammar and SGLang write it (GBNF), turned into llguidance's Lark.

``root ::= "a" [0-9]+ (item | "b")* item{2,3} # comment``. llguidance reads text as a lexer does: tokens of
a regular language, each as long as it can be. So everything regular is made one token as a whole, which
keeps its meaning exactly; only rules that refer to themselves become rules of its parser.
"""

import dataclasses
import json
import re

MAX_RULES = 2000
MAX_DEPTH = 64

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)|(?P<define>::=)|(?P<name>[A-Za-z_][\w-]*)
    |(?P<literal>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])
    |(?P<repeat>\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9})?\s*)?\})|(?P<mark>[|()*+?.])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}


@dataclasses.dataclass(frozen=True)
class _Node:
    """A part of a rule.

    Attributes:
      kind: "text" (Lark for a literal or a set), "name", "repeat", "sequence" or "choice".
      value: the text, the name, or the suffix of a repetition.
      parts: what it consists of.
    """

    kind: str
    value: str = ""
    parts: "tuple[_Node, ...]" = ()

    def names(self) -> set[str]:
        if self.kind == "name":
            return {self.value}
        return {name for part in self.parts for name in part.names()}


def ebnf_to_lark(source: str) -> str:
    """The same grammar in Lark; its rule ``root`` becomes ``start``.

    Raises:
      ValueError: with the line at fault.
    """
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise ValueError("there is no rule named root")
    for name, node in rules.items():
        unknown = sorted(node.names() - rules.keys())
        if unknown:
            raise ValueError(f"rule {name!r} refers to {unknown[0]!r}, which is not defined")
    return _Writer(rules).lark()


class _Parser:
    def __init__(self, source: str):
        self._source = source
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while position < len(source):
            found = _TOKEN.match(source, position)
            if found is None:
                raise self._error(position, f"unexpected {source[position]!r}")
            if found.lastgroup != "space":
                self._tokens.append((found.lastgroup or "", found.group(), position))
            position = found.end()
        self._tokens += [("end", "", len(source))] * 2
        self._next = 0

    def rules(self) -> dict[str, _Node]:
        out: dict[str, _Node] = {}
        while self._peek() != "end":
            kind, name, position = self._take()
            if kind != "name" or self._peek() != "define":
                raise self._error(position, "expected a rule: name ::= ...")
            self._take()
            if name in out:
                raise self._error(position, f"rule {name!r} is defined twice")
            if len(out) == MAX_RULES:
                raise self._error(position, f"more than {MAX_RULES} rules")
            out[name] = self._choice(0)
            if self._peek() not in ("end", "name"):
                _, text, position = self._take()
                raise self._error(position, f"unexpected {text!r}")
        return out

    def _choice(self, depth: int) -> _Node:
        parts = [self._sequence(depth)]
        while self._tokens[self._next][1] == "|":
            self._take()
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else _Node("choice", parts=tuple(parts))

    def _sequence(self, depth: int) -> _Node:
        parts = []
        while (part := self._item(depth)) is not None:
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Node("sequence", parts=tuple(parts))

    def _item(self, depth: int) -> _Node | None:
        kind, text, position = self._tokens[self._next]
        if kind == "literal":
            node = _Node("text", json.dumps(self._unescape(text[1:-1], position), ensure_ascii=False))
        elif kind == "set":
            node = _Node("text", self._set(text, position))
        elif kind == "name" and self._tokens[self._next + 1][0] != "define":
            node = _Node("name", text)
        elif text == ".":
            node = _Node("text", r"/(.|\n)/")
        elif text == "(":
            if depth == MAX_DEPTH:
                raise self._error(position, f"parentheses more than {MAX_DEPTH} deep")
            self._take()
            node = self._choice(depth + 1)
            if self._tokens[self._next][1] != ")":
                raise self._error(position, "a parenthesis is not closed")
        else:
            return None
        self._take()
        while (kind := self._peek()) == "repeat" or self._tokens[self._next][1] in ("*", "+", "?"):
            _, suffix, position = self._take()
            suffix = re.sub(r"\s", "", suffix)
            bounds = [int(n) for n in re.findall(r"\d+", suffix)]
            if len(bounds) == 2 and bounds[0] > bounds[1]:
                raise self._error(position, f"{suffix} repeats at least more often than at most")
            node = _Node("repeat", suffix, (node,))
        return node

    def _set(self, text: str, position: int) -> str:
        """A set of characters as a regular expression; every character is escaped by its number."""
        body, negated = (text[2:-1], "^") if text.startswith("[^") else (text[1:-1], "")
        pieces: list[tuple[str, bool]] = []  # a character, whether it was escaped
        for found in re.finditer(r"\\(?:x..|u.{4}|U.{8}|.)|[^\\]", body, re.DOTALL):
            pieces.append((self._unescape(found.group(), position), found.group().startswith("\\")))
        out, i = [], 0
        while i < len(pieces):
            low, high = pieces[i][0], pieces[i][0]
            i += 1
            if i + 1 < len(pieces) and pieces[i] == ("-", False):
                high = pieces[i + 1][0]
                i += 2
            if low > high:
                raise self._error(position, f"the range {low!r} to {high!r} is empty")
            out.append(rf"\u{{{ord(low):x}}}-\u{{{ord(high):x}}}")
        if not out:
            raise self._error(position, "a set without characters")
        return f"/[{negated}{''.join(out)}]/"

    def _unescape(self, text: str, position: int) -> str:
        def character(found: re.Match[str]) -> str:
            digits = found[1] or found[2] or found[3]
            if digits is None:
                if found[4] in "xuU":
                    raise self._error(position, f"{found[0]} lacks hexadecimal digits")
                return _NAMED.get(found[4], found[4])
            if int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) < 0xE000:
                raise self._error(position, f"{found[0]} is no character")
            return chr(int(digits, 16))

        return _ESCAPE.sub(character, text)

    def _peek(self) -> str:
        return self._tokens[self._next][0]

    def _take(self) -> tuple[str, str, int]:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _error(self, position: int, problem: str) -> ValueError:
        return ValueError(f"line {self._source.count(chr(10), 0, position) + 1}: {problem}")


class _Writer:
    def __init__(self, rules: dict[str, _Node]):
        self._rules = rules
        self._regular = _regular_rules(rules)
        self._number = {name: i for i, name in enumerate(rules)}
        self._lines: list[str] = []
        self._made = 0

    def lark(self) -> str:
        """Only what root needs, each rule once."""
        waiting, seen = ["root"], {"root"}
        while waiting:
            name = waiting.pop()
            node = self._rules[name]
            for other in sorted(node.names() - seen):
                seen.add(other)
                waiting.append(other)
            write = self._token if name in self._regular else self._rule
            self._lines.append(f"{self._name(name)}: {write(node)}")
        return f"start: {self._name('root')}\n" + "\n".join(self._lines) + "\n"

    def _name(self, name: str) -> str:
        return f"{'T' if name in self._regular else 'r'}{self._number[name]}"

    def _is_regular(self, node: _Node) -> bool:
        return node.names() <= self._regular

    def _token(self, node: _Node) -> str:
        """A regular part, as it stands in a token's definition."""
        if node.kind == "text":
            return node.value
        if node.kind == "name":
            return self._name(node.value)
        if node.kind == "repeat":
            return f"({self._token(node.parts[0])}){node.value}"
        between = " | " if node.kind == "choice" else " "
        return "(" + between.join(self._token(part) for part in node.parts) + ")" if node.parts else '""'

    def _rule(self, node: _Node) -> str:
        """A part of a rule; its regular parts become tokens of their own."""
        if self._is_regular(node):
            return self._own_token(node)
        if node.kind == "name":
            return self._name(node.value)
        if node.kind == "repeat":
            return f"({self._rule(node.parts[0])}){node.value}"
        if node.kind == "choice":
            return "(" + " | ".join(self._rule(part) for part in node.parts) + ")"
        out: list[str] = []
        run: list[_Node] = []
        for part in (*node.parts, None):
            if part is not None and self._is_regular(part):
                run.append(part)
                continue
            if run:
                out.append(self._own_token(run[0] if len(run) == 1 else _Node("sequence", parts=tuple(run))))
                run = []
            if part is not None:
                out.append(self._rule(part))
        return " ".join(out)

    def _own_token(self, node: _Node) -> str:
        if node.kind == "name":
            return self._name(node.value)
        self._made += 1
        self._lines.append(f"M{self._made}: {self._token(node)}")
        return f"M{self._made}"


def _regular_rules(rules: dict[str, _Node]) -> set[str]:
    """Rules from which no rule that refers to itself can be reached."""
    missing = {name: node.names() for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, needed in missing.items():
        for other in needed:
            users[other].append(name)
    ready = [name for name, needed in missing.items() if not needed]
    regular: set[str] = set()
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users[name]:
            missing[user].discard(name)
            if not missing[user]:
                ready.append(user)
    return regular
